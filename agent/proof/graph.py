"""The digest of a recorded loss, which shows pipeline workers whether theirs is the same."""

import hashlib

from torch import fx

from agent.pipeline.tracing.recording.constants import CONSTANT
from agent.pipeline.tracing.recording.trace import FIXED, METRICS
from agent.pipeline.tracing.variants import form_of
from agent.proof.digest import MASK, digests
from agent.tensors.device import anywhere

DIGEST = "digest"  # in the `meta` of a graph


def digest_of(graph: fx.GraphModule) -> int:
    """Digest what a graph computes, with the present values of its constants."""
    words: int | None = graph.meta.get(DIGEST)
    if words is None:
        code = form_of(graph) if graph.meta.get(FIXED) else graph.code
        text = f"{anywhere(code)}{graph.meta[METRICS]}".encode()
        found = hashlib.blake2b(text, digest_size=8).digest()
        words = graph.meta[DIGEST] = int.from_bytes(found, "little")
    constants = {name: [t] for name, t in graph.named_buffers() if name.startswith(CONSTANT)}
    return words ^ sum(one.bits for one in digests(constants)) & MASK if constants else words

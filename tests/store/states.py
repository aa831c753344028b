"""States without a model: named bytes in layers, written by any number of holders."""

import json
import random

from agent.store.archive import assemble, write_parts
from agent.store.encoding.format import ITEM_BYTES, file_of, lay_out, share
from agent.store.reading import Index, read


def make_state(seed, layers=3, tensors=4, most=3000):
    """Layers and the bytes of each: sizes, types and shapes are drawn from the seed."""
    draw = random.Random(seed)
    made = {}
    for at in range(layers):
        forms = []
        for tensor in range(draw.randint(0, tensors)):
            shape = [draw.randint(0, most) if draw.random() < 0.2 else draw.randint(1, 40)]
            shape += [draw.randint(1, 5)] * draw.randint(0, 2)
            if draw.random() < 0.1:
                shape = []
            forms.append((f"m/l{at}.t{tensor}", draw.choice(sorted(ITEM_BYTES)), shape))
        layer = lay_out(f"l{at}", forms, values=json.dumps({"at": at}))
        made[layer] = draw.randbytes(layer.layer_bytes)
    return made


def write_state(sink, state, job="job", version=1, generation=1, holders=3):
    """Every holder writes its share of every layer; the manifest, not yet committed."""
    parts = []
    for holder in range(holders):
        files = []
        for layer, data in state.items():
            start, end = share(layer.layer_bytes, holders, holder)
            if start < end:
                files.append(file_of(layer, version, start, end, [data[start:end]]))
        parts.extend(write_parts(sink, files))
    return assemble(job, version, generation, state, parts)


def read_state(sink, manifest, threads=2):
    """Every tensor of a manifest, by name."""
    index, found, wants = Index(manifest.layers), {}, []
    for layer in manifest.layers:
        for tensor in layer.tensors:
            found[tensor.name] = bytearray(tensor.end - tensor.start)
            wants.append(index.want(tensor.name, memoryview(found[tensor.name])))
    read(sink, manifest, wants, threads)
    return found


def tensors_of(state):
    """What `read_state` must give back."""
    return {
        tensor.name: data[tensor.start : tensor.end]
        for layer, data in state.items()
        for tensor in layer.tensors
    }

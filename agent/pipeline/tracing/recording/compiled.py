"""Code that `torch.compile` compiles has the same bits on every worker.

Compiled code rounds in another way than the same code run by Python, so all workers have to run the
same of the two. What a process has seen before must not decide that, so:

* Code that is first called while a loss is recorded would never be compiled in that process, so a
  call of compiled code ends the recording. Stages run what is recorded, so such a job has depth 1.
* Torch compiles code for the shape that it sees first, and for any shape when it sees a second one.
  In a job that is exact each shape is compiled by itself.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch._dynamo import config as settings
from torch._dynamo import eval_frame, trace_rules
from torch._dynamo.types import ConvertFrameReturn
from torch.fx.proxy import TraceError

from agent.errors import CannotRecord
from agent.pipeline.tracing.recording.places import asking

# Torch has 8, and runs what is beyond them uncompiled, where a newcomer would compile it.
SHAPES_MAX = 64


class CallsCompiled(CannotRecord):
    """What is recorded calls code that `torch.compile` compiles."""


@contextmanager
def compiled_refused() -> Iterator[None]:
    """Raise `CallsCompiled` where compiled code is called, also if it was compiled before."""
    found: list[str] = []

    def refuse(frame: Any, *_: Any, **__: Any) -> ConvertFrameReturn:
        if trace_rules.check(frame.f_code):  # torch never compiles this code
            return ConvertFrameReturn()
        found.append(asking())
        raise TraceError("it calls code that torch.compile compiles")

    def chosen(callback: Any) -> Any:
        return callback if callback in (None, False) else refuse

    before = eval_frame._callback_from_stance
    eval_frame._callback_from_stance = chosen
    error = None
    try:
        with settings.patch(force_compile_during_fx_trace=True):
            yield
    except Exception as raised:
        error = raised
    finally:
        eval_frame._callback_from_stance = before
    if found:  # the person's code may have caught it
        raise CallsCompiled(
            f"{found[0]}: this line calls code that torch.compile compiles, which rounds in another way than stages do: "
            "leave torch.compile out, or train with depth 1"
        ) from error
    if error is not None:
        raise error


def compile_each_shape() -> None:
    """Let what is compiled depend on the shape alone, and not on the shapes before it."""
    settings.automatic_dynamic_shapes = False
    settings.recompile_limit = max(settings.recompile_limit, SHAPES_MAX)
    settings.fail_on_recompile_limit_hit = True

"""When Dynamo, the front end of torch.compile, compiles a frame."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from fsdp2._torch.imports import WhenImported

__all__ = ["around_compilation"]


def around_compilation(start: Callable[[], None], end: Callable[[], None]) -> None:
    """Call ``start`` before Dynamo traces a frame, and ``end`` when that is compiled; from now on, for every frame.

    Frames that are compiled meanwhile are part of the first one. ``torch._dynamo`` has callbacks for this, which no
    public name reaches. It is not imported for them.
    """

    def register(callback: ModuleType) -> None:
        handler, clear = callback.callback_handler, callback.callback_handler.clear

        def started(what: Any) -> None:
            # Others are about code that runs: recorded for CUDA graphs, say.
            if what.callback_trigger is callback.CallbackTrigger.DYNAMO:
                start()

        def add() -> None:
            handler.register_start_callback(started)
            handler.register_end_callback(lambda what: end())

        def clear_others() -> None:
            """Do what torch._dynamo.reset() asks for, without forgetting us."""
            try:
                clear()
            finally:
                add()

        handler.clear = clear_others
        add()

    WhenImported(["torch._dynamo.callback"], register).start()

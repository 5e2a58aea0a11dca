"""See the operators of a watched pass: in the blocks, and if possible around them."""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torch import nn

from geomon.capture.anatomy import Anatomy
from geomon.capture.calling.calls import compiled_in
from geomon.capture.calling.patches import in_extra_pass, run_eagerly, subclasses
from geomon.capture.recorder import AttentionRecorder, failing_silently
from geomon.capture.tap import Tap
from geomon.capture.tracker import Tracker


class OperatorWatch:
    """Shows operators to the recorder of attention, inside the calls of some modules.

    Operators in blocks are seen, and around them unless compiled code runs there.

    Args:
        anatomy: Anatomy of the model.
        tracker: Knows which calls count.
        recorder: Keeps what the operators show.
    """

    def __init__(self, anatomy: Anatomy, tracker: Tracker, recorder: AttentionRecorder) -> None:
        self._anatomy, self._tracker, self._recorder = anatomy, tracker, recorder
        self._tap: Tap | None = None  # while the window is open
        self._sees_above = True  # whether operators around the blocks are seen too
        self._blocks: set[int] = set()  # ids of the blocks and of their parts
        self._hiding: set[int] = set()  # ids of those, and of their owners, with compiled code

    def open(self) -> None:
        """Begin to see operators."""
        self._tap = Tap(self._recorder)
        self.turn()
        subclasses.hold(self)

    def find_compiled(self, modules: Iterable[nn.Module], *, inside: bool) -> None:
        """Find the blocks, and what runs them, that have compiled code in them.

        Args:
            modules: The modules of the model.
            inside: Whether compiled functions that modules call matter too.
        """
        found = compiled_in(modules, inside=inside)
        self._sees_above = not found
        blocks = [part for each in self._anatomy.blocks for part in (each.module, *each.parts)]
        self._blocks.update(map(id, blocks))
        owners = [stack.owner for stack in self._anatomy.stacks if stack.owner is not None]
        self._hiding.update(
            id(module)
            for module in (*owners, *blocks)
            if found and not found.isdisjoint(map(id, module.modules()))
        )

    def close(self) -> None:
        """See nothing more; may be called more than once."""
        if self._tap is not None:
            self._tap.close()
        self._recorder.guarded = failing_silently
        subclasses.release(self)

    def end(self) -> None:
        """Remove what Ctrl-C may have left after all bodies have ended."""
        self.rest()
        run_eagerly.release(self)

    @property
    def sees_between(self) -> bool:
        """Whether operators between the blocks are seen."""
        return self._tap is not None and (self._sees_above or in_extra_pass())

    def hides(self, module: nn.Module) -> bool:
        """Whether a block, or what runs blocks, has compiled code (see `CallObserver`)."""
        return id(module) in self._hiding and not in_extra_pass()

    def turn(self) -> None:
        """Show the operators that follow to whoever sees them now."""
        if self._tap is not None:
            self._tap.sight = self._recorder.sight()

    def rest(self) -> None:
        """See nothing of the rest of a call."""
        if self._tap is not None:
            self._tap.rest()

    def go_on(self) -> None:
        """See the rest of a call if anyone sees its operators."""
        if self._tap is not None and self._tap.sight is not None:
            self._tap.go_on()

    def seeing(self, module: nn.Module) -> AbstractContextManager[None] | None:
        """Return what shows the operators of a module's call; None if not needed."""
        wanted = self.sees_between or id(module) in self._blocks
        if self._tap is None or not wanted or self._tracker.is_ignored() or self._tap.is_open:
            return None
        return self._seeing(self._tap)

    @contextmanager
    def _seeing(self, tap: Tap) -> Iterator[None]:
        held = self in run_eagerly.holders  # around a twin
        with nullcontext() if held else run_eagerly.held(self), tap.seeing():
            yield

    def suspended(self) -> AbstractContextManager[None]:
        """Return a context manager in which operators are not seen."""
        return nullcontext() if self._tap is None else self._tap.suspended()

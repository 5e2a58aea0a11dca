"""The calls of modules that a window watches, and its actions before and after them."""

from collections.abc import Callable, Sequence

from torch import nn

from geomon.capture.calling.calls import unwrap

Action = Callable[..., None]


class WatchedCalls:
    """Actions before and after the calls of modules.

    Attributes:
        sees_projecting: Whether the calls of modules that are watched only as projections are seen
            now; a block whose plan is known does without them.
    """

    def __init__(self) -> None:
        self._before: dict[int, list[Action]] = {}  # by id of the module
        self._after: dict[int, list[Action]] = {}
        self._projecting: set[int] = set()  # ids of modules that only project
        self.sees_projecting = True

    @property
    def is_empty(self) -> bool:
        """Whether no calls are watched."""
        return not self._before

    def add(self, module: nn.Module, before: Action | None, after: Action | None) -> None:
        """Act before and after the calls of a module."""
        number = id(unwrap(module))
        for actions, action in ((self._before, before), (self._after, after)):
            if action is not None:
                actions.setdefault(number, []).append(action)

    def add_projecting(self, module: nn.Module, before: Action, after: Action) -> None:
        """Act before and after the calls of a module that projects in its own way."""
        if not self.has(module):
            self._projecting.add(id(module))
        self.add(module, before, after)

    def has(self, module: nn.Module) -> bool:
        """Whether a module's calls are watched now."""
        if id(module) in self._projecting and not self.sees_projecting:
            return False
        return id(module) in self._before or id(module) in self._after

    def before(self, module: nn.Module) -> Sequence[Action]:
        """List the actions before a call of the module."""
        return self._before.get(id(module), ())

    def after(self, module: nn.Module) -> Sequence[Action]:
        """List the actions after a call of the module."""
        return self._after.get(id(module), ())

    def forget(self) -> None:
        """Watch no calls; the actions refer to the window and would delay freeing its rows."""
        self._before.clear()
        self._after.clear()

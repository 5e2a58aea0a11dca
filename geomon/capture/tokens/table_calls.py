"""Keep the calls of embedding tables for the passes that follow them."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from geomon.capture.anatomy.projections import find_widths
from geomon.capture.storage import local_shard, storage_of
from geomon.capture.tokens.token_ids import Lookup, TokenIds


class TableCalls:
    """Keeps the inputs of embedding tables, and passes on their outputs.

    Args:
        tables: The tables.
        receivers: Returns the token ids of the passes to which the current call belongs.
        follow: Follows the output of a call, given the number of the call.
    """

    def __init__(
        self,
        tables: Sequence[nn.Module],
        receivers: Callable[[], Iterable[TokenIds]],
        follow: Callable[[int, Tensor], None],
    ) -> None:
        self._tables = tables
        self._receivers, self._follow = receivers, follow
        self._passed: set[int] = set()  # storages of integers among the model's arguments
        self._count = 0
        self._calling = False  # whether a table is running

    def take_arguments(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Remember which integers are arguments of the model."""
        self._passed |= {
            storage
            for value in _with_contents([*args, *kwargs.values()])
            if isinstance(value, Tensor) and not value.is_floating_point()
            if (storage := storage_of(local_shard(value))) is not None
        }

    def before(
        self,
        table: nn.Module,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> None:
        """Keep the integers that a table receives."""
        self._calling = True
        ids = next(iter([*args, *kwargs.values()]), None)
        if not isinstance(ids, Tensor) or ids.is_floating_point() or ids.is_nested:
            return
        self._count += 1
        lookup = Lookup(
            local_shard(ids).detach().clone(), table,
            storage_of(local_shard(ids)) in self._passed, self._count,
        )  # fmt: skip
        for ids_of_pass in self._receivers():
            ids_of_pass.lookups.append(lookup)

    def after(self, table: nn.Module, module: nn.Module, output: Any) -> None:
        """Follow a table's output if it has one row per integer."""
        self._calling = False
        rows = output[0] if isinstance(output, tuple) else output
        if not isinstance(rows, Tensor) or rows.is_nested or not rows.is_floating_point():
            return
        rows = local_shard(rows)
        for ids_of_pass in self._receivers():
            seen = ids_of_pass.lookups
            is_own = bool(seen) and seen[-1].table is table and seen[-1].width is None
            if is_own and rows.shape[:-1] == seen[-1].ids.shape:
                seen[-1] = seen[-1]._replace(width=rows.shape[-1])
                self._follow(seen[-1].number, rows)

    def take_operator(self, weight: Tensor, ids: Tensor, rows: Tensor) -> None:
        """Handle a lookup in a matrix with the shape of a table that is not being called.

        Some modules hold a table, change its weights and never call it.
        """
        fitting = (table for table in self._tables if find_widths(table) == weight.shape)
        table = None if self._calling else next(fitting, None)
        if table is not None:
            self.before(table, table, (ids,), {})
            self.after(table, table, rows)


def _with_contents(values: Iterable[Any]) -> Iterator[Any]:
    """Iterate over values, with dicts replaced by their values."""
    for value in values:
        yield from value.values() if isinstance(value, Mapping) else (value,)

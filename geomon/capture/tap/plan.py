"""Plans: what was understood of a block's call, for later calls that run the same operators.

The first call of a block is followed operator by operator (`Learner`), which costs several times
the block's own Python. What was asked meanwhile, and what was answered, is a plan. A later call in
the same form goes along the plan (`Known`): it compares each operator with the plan's, keeps the
tensors that the plan names, and gives the same answers. A call that leaves its plan is not
measured, and the next one is followed again.
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from geomon.capture.tap.columns import Columns, Pattern, Projection
from geomon.capture.tap.operators import (
    DETACH,
    ROUTES,
    kind_of,
    on_this_rank,
    plain_arguments,
    tensors_in,
)
from geomon.capture.tap.provenance import AttentionWeights, Product, Provenance

# A block whose calls left their plan so often is followed operator by operator from then on.
_MOST_DEPARTURES = 2
# Batches of every other length have a form of their own; so many of a block are remembered.
_MOST_FORMS = 8

# Gives an answer, from what a call has kept.
Answer = Callable[[Mapping[int, Any]], Any]


class DepartedError(Exception):
    """A call asks what its plan does not know."""


class Slot(NamedTuple):
    """A tensor that a call keeps for its answers: a projection, or the factors of a product.

    Attributes:
        features: Dimensions of a projection that count features; None for factors.
        given: Number and shape of the projected tensor, or None.
        first: Index of its first feature on all ranks.
        changes: Whether it is changed in place later, so that it must be copied.
        at: Position of the first factor among the arguments.
    """

    features: tuple[int, ...] | None = None
    given: tuple[int | None, tuple[int, ...]] | None = None
    first: int = 0
    changes: bool = False
    at: int = 0


class Step(NamedTuple):
    """An operator of a plan.

    Attributes:
        func: The operator.
        plain: Its plain arguments; None if they are read in each call.
        role: The kind of attention that it is (see `operators.Kind`), or "".
        answers: What is answered about it, in the order of the questions.
        keeps: Numbers of the slots to fill from it.
    """

    func: Any
    plain: tuple[Any, ...] | None
    role: str = ""
    answers: tuple[Answer, ...] = ()
    keeps: tuple[int, ...] = ()

    @property
    def acts(self) -> bool:
        """Whether there is anything to do but to run it."""
        return bool(self.role or self.keeps)


@dataclass(frozen=True)
class Plan:
    """What was understood of a block's call.

    Attributes:
        steps: The operators, up to the last that acts.
        slots: Tensors to keep.
        events: By number of a module that projected in its own way, the slots to fill from it.
        changed: For each attention written out by hand, whether its softmax weights were changed.
        goes_on: Whether attention or a choice was seen after the steps.
    """

    steps: tuple[Step, ...]
    slots: tuple[Slot, ...]
    events: Mapping[int, tuple[int, ...]]
    changed: tuple[bool | None, ...]
    goes_on: bool = False


class Learner(Provenance):
    """Follows the tensors of a block's call, and remembers its way."""

    def __init__(self) -> None:
        super().__init__()
        self._way: list[Step] = []
        self._asked: dict[int, list[Any]] = {}  # answers by number of the operator
        self._expected_of: list[AttentionWeights] = []

    def begin(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Handle an operator that is about to run."""
        if func is not DETACH:
            role = kind_of(func).role
            # The flags and the scale of fused attention are read each time.
            plain = None if role in ROUTES else plain_arguments(args, kwargs)
            self._way.append(Step(func, plain, role))
            self.at += 1

    def products(self, values: Tensor) -> tuple[Product, ...]:
        """Return the products that flowed into a tensor."""
        return self._answered(super().products(values))

    def scale(self, values: Tensor) -> float | None:
        """Return the factor from a product to this tensor; None if it is not a known number."""
        return self._answered(super().scale(values))

    def columns(self, heads: Tensor) -> Columns | None:
        """Return the projection columns behind heads, [sequences, heads, places, head width]."""
        return self._answered(super().columns(heads))

    def token_counts(self, values: Tensor) -> list[int]:
        """List the token counts of the projections that a tensor was made from."""
        return self._answered(super().token_counts(values))

    def expect(self, weights: AttentionWeights) -> None:
        """Record in `weights` what becomes of the next softmax's result."""
        self._expected_of.append(weights)
        super().expect(weights)

    def _answered(self, answer: Any) -> Any:
        self._asked.setdefault(self.at, []).append(answer)
        return answer

    def plan(self) -> Plan | None:
        """Make the plan of the call that was followed; None if its answers depend on numbers."""
        if self.failed or self.reads_numbers:
            return None
        slots: list[Slot] = []
        keeps: dict[int, list[int]] = {}  # slots by number of the operator, or of the event
        known: dict[Any, int] = {}  # slots of projections and products
        places: dict[int | None, int] = {}  # numbers in place of addresses

        def slot_of(kept: Projection | Product) -> int:
            key = id(kept)
            if key not in known:
                known[key] = len(slots)
                slots.append(_slot_of(kept, places))
                keeps.setdefault(kept.made_at, []).append(known[key])
            return known[key]

        def again(answer: Any) -> Answer:
            if isinstance(answer, Columns):
                roots = [slot_of(root) for root in answer.projections]
                return functools.partial(_columns, roots, answer.pattern)
            if isinstance(answer, tuple):
                return functools.partial(_products, [(slot_of(x), x.factor) for x in answer])
            return lambda held: answer

        answers = {at: tuple(map(again, every)) for at, every in self._asked.items()}
        steps = [
            step._replace(answers=answers.get(at, ()), keeps=tuple(keeps.get(at, ())))
            for at, step in enumerate(self._way)
        ]
        while steps and not steps[-1].acts:
            steps.pop()
        events = {-1 - at: tuple(own) for at, own in keeps.items() if at < 0}
        return Plan(tuple(steps), tuple(slots), events, tuple(x.changed for x in self._expected_of))


def _slot_of(kept: Projection | Product, places: dict[int | None, int]) -> Slot:
    """Describe what is to be kept; `places` numbers the addresses of projected tensors."""
    if isinstance(kept, Product):
        return Slot(at=kept.position)
    given = kept.given
    if given is not None:
        given = places.setdefault(given[0], len(places)), given[1]
    return Slot(kept.sizes[1], given, kept.first, kept.changes)


def _columns(roots: Sequence[int], pattern: Pattern, held: Mapping[int, Any]) -> Columns:
    return Columns(tuple(held[slot] for slot in roots), pattern)


def _products(made_of: Sequence[tuple[int, float]], held: Mapping[int, Any]) -> tuple[Product, ...]:
    factors = [(*held[slot], factor) for slot, factor in made_of]
    return tuple(Product(left, right, factor) for left, right, factor in factors)


class Known:
    """A call of a block along its plan; it answers as `Provenance` does.

    Attributes:
        departed: Whether the call has left the plan.
        failed: Whether an error of geomon's own came in between.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan, self._steps = plan, iter(plan.steps)
        self._answers: list[Answer] = []
        self._held: dict[int, Any] = {}
        self._events = 0
        self._changed = iter(plan.changed)
        self.departed = self.failed = False

    @property
    def sees_modules(self) -> bool:
        """Whether the plan names outputs of modules."""
        return bool(self._plan.events)

    @property
    def goes_on(self) -> bool:
        """Whether anything may be seen after the steps."""
        return self._plan.goes_on

    def start(self, values: Iterable[Any], hidden: Tensor | None = None) -> None:
        """Nothing is followed."""

    def next(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Step | None:
        """Go on by an operator; None if there is nothing to do but to run it."""
        if func is DETACH or self.departed:
            return None
        step = next(self._steps, None)
        if step is None:
            return None
        if step.func is not func or not _fits(step.plain, args, kwargs):
            self.departed = True
            return None
        if not step.role and not step.keeps:
            return None
        self._answers = [*step.answers]
        return step

    def keep(self, step: Step, args: tuple[Any, ...], result: Any) -> None:
        """Keep what the plan names of an operator that has run."""
        for number in step.keeps:
            slot = self._plan.slots[number]
            if slot.features is None:
                self._held[number] = on_this_rank(args[slot.at : slot.at + 2], {})
            else:
                self._fill(number, slot, on_this_rank(result, {}))

    def projected(self, output: Tensor, given: Tensor, first: int = 0) -> None:
        """Keep a module's output if the plan names it."""
        for number in self._plan.events.get(self._events, ()):
            self._fill(number, self._plan.slots[number], output)
        self._events += 1

    def _fill(self, number: int, slot: Slot, values: Tensor) -> None:
        assert slot.features is not None
        values = values.detach().clone() if slot.changes else values
        projection = Projection(values, slot.features, slot.given)
        projection.first = slot.first
        self._held[number] = projection

    def forget(self) -> None:
        """Free what was kept."""
        self._held.clear()
        self._answers.clear()
        self._steps = iter(())

    def products(self, values: Tensor) -> tuple[Product, ...]:
        """Return the products that flowed into a tensor."""
        found: tuple[Product, ...] = self._answer()
        return found

    def scale(self, values: Tensor) -> float | None:
        """Return the factor from a product to this tensor; None if it is not a known number."""
        found: float | None = self._answer()
        return found

    def columns(self, heads: Tensor) -> Columns | None:
        """Return the projection columns behind heads."""
        found: Columns | None = self._answer()
        return found

    def token_counts(self, values: Tensor) -> list[int]:
        """List the token counts of the projections that a tensor was made from."""
        found: list[int] = self._answer()
        return found

    def expect(self, weights: AttentionWeights) -> None:
        """Say what becomes of the next softmax's result."""
        weights.changed = next(self._changed, None)

    def _answer(self) -> Any:
        if not self._answers:
            self.departed = True
            raise DepartedError
        return self._answers.pop(0)(self._held)


def _fits(plain: tuple[Any, ...] | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call has these plain arguments."""
    if plain is None:
        return True
    counts, places, names = plain
    if (len(args), len(kwargs)) != counts:
        return False
    for place, value in places:
        other = args[place]
        if other is not value and (type(other) is not type(value) or other != value):
            return False
    for name, value in names:
        other = kwargs.get(name)
        if other is not value and (type(other) is not type(value) or other != value):
            return False
    return True


Origins = Provenance | Known  # answers where the tensors of a block's call come from


@dataclass
class Plans:
    """Plans of the blocks of a model, by module and by the form of their calls."""

    _plans: dict[nn.Module, dict[Any, Plan]] = field(default_factory=dict)
    _departures: dict[nn.Module, int] = field(default_factory=dict)

    def of(self, module: nn.Module, form: Any) -> Plan | None:
        """Return the plan of a call, or None if there is none."""
        return self._plans.get(module, {}).get(form)

    def learn(self, module: nn.Module, form: Any, plan: Plan) -> None:
        """Remember a plan, unless calls of the module have left theirs again and again."""
        own = self._plans.setdefault(module, {})
        if self._departures.get(module, 0) < _MOST_DEPARTURES:
            own[form] = plan
        if len(own) > _MOST_FORMS:
            own.pop(next(iter(own)))

    def leave(self, module: nn.Module, form: Any) -> None:
        """Forget the plan that a call has left."""
        self._plans.get(module, {}).pop(form, None)
        self._departures[module] = self._departures.get(module, 0) + 1


def form_of(module: nn.Module, given: Sequence[Any], wanted: Any) -> Any:
    """Describe a call by all that its operators are expected to depend on."""
    kinds = {x.device.type for x in tensors_in(given)}
    casts = tuple(
        torch.get_autocast_dtype(kind) for kind in sorted(kinds) if torch.is_autocast_enabled(kind)
    )
    grad = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    return module.training, grad, casts, wanted, _outline(given)


def _outline(value: Any) -> Any:
    """Describe a value: a tensor by its form, a container by its contents."""
    if isinstance(value, Tensor):
        if value.is_nested or value.layout is not torch.strided:
            return type(value), value.layout, value.dtype
        return type(value), value.shape, value.stride(), value.dtype
    if isinstance(value, list | tuple):
        return tuple(map(_outline, value))
    if isinstance(value, Mapping):
        return tuple((name, _outline(each)) for name, each in value.items())
    if isinstance(value, int | float | bool | str | None):
        return value
    return type(value)

"""Plans: what was understood of a block's call, for later calls that run the same operators.

The first call of a block is followed operator by operator (`Learner`), which costs several times
the block's own Python. The questions asked meanwhile, with their answers, are a plan. A later call
in the same form goes along the plan (`Known`): it compares each operator with the plan's, keeps the
tensors that the plan names, and gives the same answers. A call that leaves its plan is not
measured, and the next one is followed again. Calls that run the same operators with the same plain
arguments are taken for alike: if a block exchanged its queries and keys from call to call without
any other operator, their projections would be exchanged in silence.
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from geomon.capture.modes import unseen
from geomon.capture.tap.columns import Columns, Pattern, Projection
from geomon.capture.tap.operators import (
    DETACH,
    ROUTES,
    kind_of,
    on_this_rank,
    plain_arguments,
    tensors_in,
)
from geomon.capture.tap.outputs import HeadOutputs, Shown, ShownAgain
from geomon.capture.tap.provenance import AttentionWeights, Product, Provenance

# A block whose calls left their plan so often is followed operator by operator from then on.
_MOST_DEPARTURES = 2
# Batches of every other length have a form of their own; so many of a block are remembered.
_MOST_FORMS = 8

# Gives an answer, from what a call has kept.
Answer = Callable[[Mapping[int, Any]], Any]
# Takes what is kept of an operator, from its arguments and its result.
Keep = Callable[[tuple[Any, ...], Any], Any]


class DepartedError(Exception):
    """A call asks what its plan does not know."""


class Step(NamedTuple):
    """An operator of a plan.

    Attributes:
        func: The operator.
        plain: Its plain arguments; None if they are read in each call.
        role: The kind of attention that it is (see `operators.Kind`), or "".
        answers: Answers about it, in the order of the questions.
        keeps: Values to keep of it, by number.
        shows: Outputs of heads that it projects.
    """

    func: Any
    plain: tuple[Any, ...] | None
    role: str = ""
    answers: tuple[Answer, ...] = ()
    keeps: Mapping[int, Keep] = MappingProxyType({})
    shows: Sequence[ShownAgain] = ()

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to do but to run it."""
        return not (self.role or self.keeps or self.shows)


@dataclass(frozen=True)
class Plan:
    """Everything that later calls of a block need to know of its first call.

    Attributes:
        steps: The operators, up to the last one at which anything is to be done; all of them if
            nothing is.
        events: Values to keep of the modules that project in their own way, by their number.
        goes_on: Whether attention or a choice was seen after the steps.
    """

    steps: tuple[Step, ...]
    events: Mapping[int, Mapping[int, Keep]]
    goes_on: bool = False


class Learner(Provenance):
    """Follows the tensors of a block's call, and remembers its way."""

    def __init__(self) -> None:
        super().__init__()
        self._way: list[Step] = []

    def begin(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Handle an operator that is about to run."""
        if func is not DETACH:
            role = kind_of(func).role
            # The flags and the scale of fused attention are read each time.
            plain = None if role in ROUTES else plain_arguments(args, kwargs)
            self._way.append(Step(func, plain, role))
            self.at += 1

    def plan(self) -> Plan | None:
        """Make the plan of the call that was followed; None if its answers depend on numbers."""
        if self.failed or self.reads_numbers or self.outputs.reads_numbers:
            return None
        keeps: dict[int, dict[int, Keep]] = {}  # by number of the operator, or of the event
        numbers: dict[int, int] = {}  # of what is kept, by its id
        places: dict[int | None, int] = {}  # numbers in place of addresses

        def number_of(kept: Projection | Product) -> int:
            if id(kept) not in numbers:
                number = numbers[id(kept)] = len(numbers)
                keeps.setdefault(kept.made_at, {})[number] = _keep_of(kept, places)
            return numbers[id(kept)]

        def again(answer: Any) -> Answer:
            if isinstance(answer, Columns):
                roots = [number_of(root) for root in answer.projections]
                return functools.partial(_columns, roots, answer.pattern)
            if isinstance(answer, tuple):
                return functools.partial(_products, [(number_of(x), x.factor) for x in answer])
            answer = answer.changed if isinstance(answer, AttentionWeights) else answer
            return lambda held: answer

        answers = {at: tuple(map(again, every)) for at, every in self.asked.items()}
        events = {-1 - at: own for at, own in keeps.items() if at < 0}
        return Plan(_steps(self._way, answers, keeps, self.outputs.again), events)


def _steps(
    way: Iterable[Step],
    answers: Mapping[int, tuple[Answer, ...]],
    keeps: Mapping[int, Mapping[int, Keep]],
    shows: Mapping[int, Sequence[ShownAgain]],
) -> tuple[Step, ...]:
    """Return a block's operators with all that is to be done at them, up to the last such one.

    If nothing is to be done, all operators are returned: the call may have skipped the attention,
    and a later call that does not skip it must be seen to differ.
    """
    steps = [
        step._replace(answers=answers.get(at, ()), keeps=keeps.get(at, {}), shows=shows.get(at, ()))
        for at, step in enumerate(way)
    ]
    last = max((at for at, step in enumerate(steps, 1) if not step.is_idle), default=len(steps))
    return tuple(steps[:last])


def _keep_of(kept: Projection | Product, places: dict[int | None, int]) -> Keep:
    """Return how to keep the same again; `places` numbers the addresses of projected tensors."""
    if isinstance(kept, Product):
        return functools.partial(_factors, kept.position)
    given = kept.given
    if given is not None:
        given = places.setdefault(given[0], len(places)), given[1]
    return functools.partial(_projection, kept.sizes[1], given, kept.first, kept.changes)


def _factors(at: int, args: tuple[Any, ...], result: Any) -> Any:
    return on_this_rank(args[at : at + 2], {})


def _projection(
    features: tuple[int, ...],
    given: tuple[int | None, tuple[int, ...]] | None,
    first: int,
    changes: bool,
    args: tuple[Any, ...],
    result: Any,
) -> Projection:
    projection = Projection(on_this_rank(result, {}), features, given)
    projection.first = first
    if changes:
        with unseen():
            projection.keep()
    return projection


def _columns(roots: Sequence[int], pattern: Pattern, held: Mapping[int, Any]) -> Columns:
    return Columns(tuple(held[number] for number in roots), pattern)


def _products(made_of: Sequence[tuple[int, float]], held: Mapping[int, Any]) -> tuple[Product, ...]:
    return tuple(Product(held[number][0], held[number][1], factor) for number, factor in made_of)


class Known:
    """A call of a block along its plan; it answers as `Provenance` does.

    Attributes:
        departed: Whether the call has left the plan.
        failed: Whether an error of geomon's own came in between.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan, self._at = plan, 0  # number of the next step
        self._answers: list[Answer] = []
        self._held: dict[int, Any] = {}
        self._expected: list[HeadOutputs | None] = []
        self._shown: list[Shown] = []
        self._events = 0
        self.departed = self.failed = False

    @property
    def sees_modules(self) -> bool:
        """Whether the plan names outputs of modules."""
        return bool(self._plan.events)

    def has_left(self) -> bool:
        """Whether a call that is over has left the plan, or ended before it."""
        return self.departed or self.failed or not self.is_complete

    @property
    def is_complete(self) -> bool:
        """Whether all steps have been made."""
        return self._at >= len(self._plan.steps)

    @property
    def goes_on(self) -> bool:
        """Whether anything may be seen after the steps."""
        return self._plan.goes_on

    def start(self, values: Iterable[Any], hidden: Tensor | None = None) -> None:
        """Nothing is followed."""

    def next(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Step | None:
        """Go on by an operator; None if there is nothing to do but to run it."""
        if func is DETACH or self.departed or self.is_complete:
            return None
        step = self._plan.steps[self._at]
        self._at += 1
        if step.func is not func or not _fits(step.plain, args, kwargs):
            self.departed = True
            return None
        if step.is_idle:
            return None
        self._answers = [*step.answers]
        return step

    def keep(self, step: Step, args: tuple[Any, ...], result: Any) -> None:
        """Keep what the plan names of an operator that has run."""
        for number, keep in step.keeps.items():
            self._held[number] = keep(args, result)
        for shown in step.shows:
            self._shown += shown.find(self._expected, on_this_rank(args, {}))

    def take_shown(self) -> list[Shown]:
        """Return the outputs of heads that the last operator projected."""
        shown, self._shown = self._shown, []
        return shown

    def projected(self, output: Tensor, given: Tensor, first: int = 0) -> None:
        """Keep a module's output if the plan names it."""
        for number, keep in self._plan.events.get(self._events, {}).items():
            self._held[number] = keep((), output)
        self._events += 1

    def forget(self) -> None:
        """Free what was kept."""
        self._held.clear()
        self._answers.clear()
        self._at = len(self._plan.steps)

    def expect(self, weights: AttentionWeights) -> None:
        """Say what becomes of the next softmax's result."""
        weights.changed = self._answer(None)
        self._expected.append(weights.outputs)

    def _answer(self, values: Tensor | None) -> Any:
        if not self._answers:
            self.departed = True
            raise DepartedError
        return self._answers.pop(0)(self._held)

    # The questions of `Provenance`, in the order in which the plan heard them.
    products = scale = columns = token_counts = _answer


def _fits(plain: tuple[Any, ...] | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call has these plain arguments (see `plain_arguments`)."""
    if plain is None:
        return True
    counts, places, names, values = plain
    if (len(args), len(kwargs)) != counts:
        return False
    others = [args[place] for place in places] + [kwargs.get(name) for name in names]
    return all(map(_is_same, others, values))


def _is_same(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and bool(one == other))


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

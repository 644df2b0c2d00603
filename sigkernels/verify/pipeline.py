"""``verify``: each stage takes what the last one left open, and only what the checker proves is kept."""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from typing import Any, NamedTuple

import numpy as np

from ..codes import guaranteed_size
from ..labels import LabelSets
from ..validation import check_bool
from . import solver_stages
from .certificate import Certificate
from .estimators import names_of, rule_of, sets_of
from .input_ball import BallName
from .inputs import as_question
from .label_names import Names, check_names
from .ledger import Ledger
from .progress import Asked, Progress
from .question import Question, active_labels, distinct_sets
from .report import Report, StageReport
from .rules import Domain, Rule
from .solvers import lp
from .solvers.arrays import namespace
from .solvers.cone import Cone, Found
from .solvers.highest_logits import highest_logits
from .solvers.newton import motzkin, newton, newton_on_all_rows
from .threads import one_blas_thread
from .witness import alternation_certificate, notch_points, roots_certificate, runs_of

SINGLE_FIRST = ("cuda",)  # devices on which float32 is so much faster that witnesses are sought in it first
KNOWN_AT_ONCE = 256  # witnesses that are proved by one matrix product
MOTZKIN_WIDTH = 300  # from this width on, a cheap search for witnesses before Newton pays


class _Stage(NamedTuple):
    name: str
    run: Callable[[Ledger, np.ndarray], None]


def verify(
    head_or_matrix: Any,
    label_sets: Any,
    bias: Any = None,
    tol: float = 1e-8,
    box: float | None = None,
    radius: bool = False,
    device: str = "cpu",
    executor: Executor | None = None,
    progress: Asked = None,
    *,
    rule: Rule | None = None,
    threshold: Any = None,
    domain: Domain = "all",
    ball: BallName = "box",
    names: Names | None = None,
) -> Report:
    """Decide which label sets a classifier can ever predict, with a proof for each answer.

    A set y is argmaxable when some input x gives every label its sign: ``y_i(w_i·x + c_i) > 0``. Its radius is that
    of the largest ball of such inputs with its centre within ``|x_j| ≤ box``: its distance from every boundary.

    Args:
        head_or_matrix: a ``DFTHead``, ``LinearHead`` or ``nn.Linear``, a matrix W ``[n, d]`` (numpy or torch), or a
            fitted ``MultiLabelClassifier`` or linear classifier of scikit-learn (``OneVsRestClassifier`` and
            ``MultiOutputClassifier`` of linear ones, too).
        label_sets: ``LabelSets``, a list of lists, a dense 0/1 matrix ``[m, n]`` or a sparse one; for a
            ``MultiLabelClassifier`` also names or classes, as its y held them.
        bias: ``[n]``, added to the logits of a matrix.
        tol: the radius from which a set counts as ``ARGMAXABLE`` rather than ``THIN``.
        box: the bound on the entries of x, 1e4 unless given; with ``ball="l2"`` on its length, 1 unless given.
        radius: also close the interval of every radius, to 1e-6 of its size.
        device: where the screens run: ``"cpu"`` (numpy) or ``"cuda"`` (cupy; witnesses are sought in float32 first).
            Proofs are made on the CPU, in float64.
        executor: a ``concurrent.futures.Executor`` for the linear programs and the exact stage.
        progress: True or False for a progress bar or none, None for one on a terminal when it takes long, or a
            function that is called with (sets decided, sets in all).
        rule: which labels are predicted: ``"threshold"`` (the default), those with a probability above the threshold;
            ``"topk"``, as many as the set has, with the highest logits; ``"argmax"``, the one with the highest logit.
        threshold: for ``rule="threshold"``: a probability (0.5 unless given), one for each label ``[n]``, or
            ``"free"``: chosen for each input, as one more feature. An estimator's rule and threshold are its own.
        domain: ``"all"`` inputs, or ``"nonnegative"`` ones alone: features after a ReLU. A plain matrix then rules out
            more sets, and the radius is that of a ball of inputs within ``0 ≤ x_j ≤ box``.
        ball: where the centre of a set's ball may lie: ``"box"``, ``|x_j| ≤ box``, or ``"l2"``, ``‖x‖₂ ≤ box``. The radius
            on the unit l2 ball is the margin of support vector machines, ``max min_i y_i(w_i·x + c_i)/‖w_i‖``: without
            a bias, the sine of the angle by which an input may rotate. Whether a set is possible does not depend on it.
        names: one name for each label, for summaries and explanations in words; or a mapping between names and numbers,
            such as ``tokenizer.get_vocab()`` or ``config.id2label``.

    Returns:
        A :class:`Report`, one line per set, in the order of ``label_sets``.

    Example:
        >>> W = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
        >>> report = sk.verify(W, [[0, 2], [0, 1]])  # the third label follows from the first two
        >>> report.verdicts
        array([ARGMAXABLE, UNARGMAXABLE], dtype=object)
        >>> report.witness(0).shape, report.certificate(1).kind
        ((2,), 'gordan')
        >>> bool(report.check())
        True
    """
    device = check_resources(device, executor, radius)
    decision = rule_of(head_or_matrix, rule, threshold)
    question, notes = as_question(head_or_matrix, bias, tol, box, decision, domain, ball)
    if not question.is_dense:
        notes.append(
            f"W would have {question.n * question.d:,} entries and is not formed: only closed forms were tried, "
            "so THIN sets may have a larger radius"
        )
    given = LabelSets.of(sets_of(head_or_matrix, label_sets), question.labels).to("cpu")
    question.rule.check_sets(given)
    checked_names = check_names(names_of(head_or_matrix, names), question.labels)
    report = decide(question, given, notes, radius=radius, device=device, executor=executor, progress=progress)
    report.names = checked_names
    return report


def check_resources(device: Any, executor: Any, radius: Any) -> str:
    """The name of the device; what is no device, executor or flag is refused before anything else."""
    check_bool("radius", radius)
    if executor is not None and (isinstance(executor, type) or not hasattr(executor, "submit")):
        got = f"the class {executor.__name__}: make one" if isinstance(executor, type) else type(executor).__name__
        raise TypeError(f"executor must be a concurrent.futures.Executor, got {got}")
    namespace(str(device))
    return str(device)


def decide(
    question: Question,
    given: LabelSets,
    notes: list[str],
    *,
    radius: bool = False,
    device: str = "cpu",
    executor: Executor | None = None,
    progress: Asked = False,
    known: Sequence[Certificate] = (),
    closed_forms: bool = False,
    solve_at_most: int | None = None,
) -> Report:
    """The report on these sets, after every check of what was given.

    ``known``: a certificate for each set to try before anything is solved. ``closed_forms``: try nothing else but those;
    so too where more than ``solve_at_most`` sets are still open after ``known``.
    """
    sets, inverse = distinct_sets(active_labels(given))
    sets = question.with_domain(sets)
    xp = namespace(device)

    with one_blas_thread(), Progress(progress, len(sets)) as bar:
        began = time.perf_counter()
        ledger = Ledger(question, sets, bar.add)
        if known:
            _offer_known(ledger, [known[line] for line in np.unique(inverse, return_index=True)[1].tolist()])
        stages = [StageReport("constant", len(sets), int(ledger.settled().sum()), time.perf_counter() - began)]
        few = solve_at_most is None or len(ledger.open()) <= solve_at_most
        solvers = question.is_dense and not closed_forms and few
        for stage in _stages(question, xp, device.split(":")[0] in SINGLE_FIRST, executor, solvers):
            which = ledger.open()
            if not len(which):
                break
            began = time.perf_counter()
            ledger.begin(stage.name)
            stage.run(ledger, which)
            decided = len(which) - len(ledger.open())
            stages.append(StageReport(stage.name, len(which), decided, time.perf_counter() - began))
        if radius and solvers:
            stages += _close_radii(ledger, xp, executor)
    return Report.from_ledger(question, given, inverse, ledger, stages, notes)


def _offer_known(ledger: Ledger, known: Sequence[Certificate]) -> None:
    """Prove a certificate for each set; witnesses many at a time."""
    witnesses = {i: c.witness for i, c in enumerate(known) if c.kind == "witness" and c.witness is not None}
    numbers = {i: witness for i, witness in witnesses.items() if witness.dtype == np.float64}  # others are fractions
    which = np.array(list(numbers), dtype=np.int64)
    for start in range(0, len(which), KNOWN_AT_ONCE):
        part = which[start : start + KNOWN_AT_ONCE]
        ledger.offer_found(Found(part, np.stack([numbers[i] for i in part.tolist()]), [], []))
    for i, certificate in enumerate(known):
        if i not in numbers:
            ledger.offer(i, certificate)


def _close_radii(ledger: Ledger, xp: Any, executor: Executor | None) -> Iterable[StageReport]:
    """Make the two bounds of every radius meet: an interior-point method for many sets at once, then one by one.

    One by one HiGHS in the box, and an active set in the l2 ball.
    """
    ledger.target = math.inf
    wanted = ledger.yes if ledger.question.bias is None else np.ones(len(ledger.sets), dtype=bool)

    def stage(name: str, run: Callable[[np.ndarray], None]) -> StageReport:
        which = np.flatnonzero(wanted & ~ledger.closed())
        began = time.perf_counter()
        ledger.begin(name)
        run(which)
        return StageReport(name, len(which), int(ledger.closed()[which].sum()), time.perf_counter() - began)

    yield stage("radius", lambda which: solver_stages.interior_points(ledger, which, xp))
    in_box = ledger.question.ball.name == "box"
    one_by_one = solver_stages.linear_programs if in_box else solver_stages.active_sets
    if np.any(wanted & ~ledger.closed()):
        yield stage("radius lp" if in_box else "radius active", lambda which: one_by_one(ledger, which, executor))
    if np.any(ledger.yes & ~ledger.closed()):
        yield stage("radius exact", lambda which: solver_stages.exact_balls(ledger, which))


def _stages(question: Question, xp: Any, single: bool, executor: Executor | None, solvers: bool) -> Iterable[_Stage]:
    """The stages for this question, in order, with ``solvers`` or closed forms alone.

    ``single``: the screens look in float32 first.
    """
    if question.codes:
        yield _Stage("codes", _code_words)
    if question.k >= 0:
        # Codes leave wide regions: what Newton finds in them is cheaper than thin polynomials, proved exactly.
        yield _Stage("closed form", functools.partial(_closed_form, exact=not (question.codes and solvers)))
    if not solvers:
        return
    screens = _Screens(question, xp)
    if question.threshold_unit and question.domain == "all":
        yield _Stage("highest logits", screens.highest_logits)
    if question.k < 0 and question.d >= MOTZKIN_WIDTH:
        yield _Stage("motzkin", functools.partial(screens.motzkin, single=single))
    if single:
        yield _Stage("newton float32", functools.partial(screens.newton, single=True))
    yield _Stage("newton", screens.newton)
    if question.codes:
        yield _Stage("thin closed form", _closed_form)
    yield _Stage("lp", functools.partial(_programs, executor=executor))
    if question.k < 0:
        yield _Stage("exact", functools.partial(solver_stages.exact_alternatives, executor=executor))
    yield _Stage("thin", functools.partial(_more_room, xp=xp, executor=executor))
    yield _Stage("exact ball", solver_stages.exact_balls)


class _Screens:
    """Searches for many sets at once. A screen may fail on numbers that it cannot handle: the next stage gets the sets."""

    def __init__(self, question: Question, xp: Any):
        self.question, self.xp = question, xp
        self._cone: tuple[bool, Cone] | None = None

    def highest_logits(self, ledger: Ledger, which: np.ndarray) -> None:
        with np.errstate(all="ignore"):
            for found in highest_logits(self.question, self.xp, ledger.sets, which):
                ledger.offer_found(found)

    def motzkin(self, ledger: Ledger, which: np.ndarray, single: bool = False) -> None:
        self._offer(ledger, lambda: motzkin(self._unit_rows(single), ledger.sets, which))

    def newton(self, ledger: Ledger, which: np.ndarray, single: bool = False) -> None:
        if self.question.k < 0 or self.question.codes:
            self._offer(ledger, lambda: newton(self._unit_rows(single), ledger.sets, which))
        else:  # neighbouring rows of a DFT are nearly equal: a few of them say little
            self._offer(ledger, lambda: newton_on_all_rows(self._unit_rows(single), ledger.sets, which, ledger.yes))

    def _offer(self, ledger: Ledger, find: Callable[[], Iterable[Found]]) -> None:
        with np.errstate(all="ignore"), contextlib.suppress(np.linalg.LinAlgError):
            for found in find():
                ledger.offer_found(found)

    def _unit_rows(self, single: bool) -> Cone:
        """Made when a screen needs them, and once for all that do."""
        if self._cone is None or self._cone[0] != single:
            self._cone = None  # the memory of the others is free before these are made
            self._cone = single, Cone(self.question, self.xp, single)
        return self._cone[1]


def _programs(ledger: Ledger, which: np.ndarray, executor: Executor | None) -> None:
    """Linear programs for the sets without a witness."""
    solver_stages.linear_programs(ledger, which[~ledger.yes[which]], executor)


def _more_room(ledger: Ledger, which: np.ndarray, xp: Any, executor: Executor | None) -> None:
    """Largest balls for the sets whose witness is in too small a one."""
    which = _worth_a_program(ledger, which)
    if ledger.question.ball.name == "box":
        solver_stages.linear_programs(ledger, which, executor)
    else:
        solver_stages.interior_points(ledger, which, xp)
        solver_stages.active_sets(ledger, which[~ledger.settled()[which]], executor)


def _worth_a_program(ledger: Ledger, which: np.ndarray) -> np.ndarray:
    """Sets with a witness in too small a ball, but not those of a large DFT: such regions are beyond HiGHS."""
    large_dft = ledger.question.k >= 0 and ledger.question.n * ledger.question.d > lp.SMALL
    return which[:0] if large_dft else which[ledger.yes[which]]


def _code_words(ledger: Ledger, which: np.ndarray) -> None:
    """Small sets by the formula of the codes: nothing is solved."""
    most = guaranteed_size(ledger.question.codes, ledger.question.n)
    for i in which.tolist():
        if len(ledger.sets[i]) <= most:
            ledger.offer(i, Certificate("codes"))


def _closed_form(ledger: Ledger, which: np.ndarray, exact: bool = True) -> None:
    """Sets with at most k runs by trigonometric polynomials; without slack, all others by counting alternations.

    Without ``exact`` sums only polynomials that predict their set clearly say more of its radius than their roots do.
    """
    question, sets = ledger.question, ledger.sets
    few: list[int] = []
    for i in which.tolist():
        if len(runs_of(sets[i], question.n)) <= question.k:
            few.append(i)
            ledger.offer(i, roots_certificate(sets[i], question.n))
        elif question.is_pure_dft:
            ledger.offer(i, alternation_certificate(sets[i], question.n, question.k))
    for start in range(0, len(few), 256):
        part = np.array(few[start : start + 256])
        ledger.offer_found(Found(part, notch_points(question, [sets[i] for i in part.tolist()]), [], []), exact)

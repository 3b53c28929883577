"""A reward for programs: run what the model wrote in a sandbox, and compare what it answers out here."""

import math
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from gnomon.core.errors import ConfigError, bounded
from gnomon.rewards.base import Sample, Verifier, VerifierError, column
from gnomon.rewards.code.cases import Case, Cases, StdinCase, read_cases
from gnomon.rewards.code.isolated import judge_isolated
from gnomon.rewards.code.program import Answers, harness, program_of, read_answers
from gnomon.rewards.code.published import PRIVATE, PUBLIC, with_public
from gnomon.rewards.code.text import last_program
from gnomon.rewards.sandbox.base import Outcome, SandboxLimits
from gnomon.rewards.sandbox.linux import LinuxSandbox
from gnomon.rewards.sandbox.monty import Monty
from gnomon.rewards.sandbox.packages import check_names, importable
from gnomon.rewards.sandbox.selftest import AnySandbox, Kind, choose

__all__ = ["Code", "last_program"]

_COLUMNS = ("tests", "test_list", "test", "input_output", "test_cases", PRIVATE, PUBLIC)

Credit = Literal["all", "each"]


@dataclass(frozen=True)
@bounded(tolerance=">= 0 and finite", case_seconds="> 0", total_seconds="> 0")
class Code(Verifier):
    """1.0 if the completion's program passes every case of the tests column, else 0.0.

    `last_program` says which text of the completion is the program; without one the reward is 0. A program that raises,
    hangs, takes too much or does not run at all has not passed: 0, not an error. What a case expects never enters the
    process that runs the program, so no program can read it, and what it patches there (an ``==`` that is always true,
    an early exit, a forged line of output) changes nothing here. Function calls and asserts are answered by lines that
    carry a secret of this run, in one process; with one line missing none counts.

    Attributes:
        kind: "code".
        column: Column with the cases, in one of the forms of `cases`.
        credit: "all" wants every case; "each" gives the share that passed.
        tolerance: Largest difference of two numbers, absolute and relative, at least 0.
        case_seconds: Seconds of wall time to read one input and write its output.
        total_seconds: Seconds for all cases; a case that did not run by then has not passed. It must be less than the
            grading deadline.
        memory_mib: MiB of memory of one process.
        sandbox: What isolates the program: see `sandbox.selftest.choose`.
        packages: Packages that programs and tests may import; set ``packages`` of the experiment instead.
    """

    kind: Literal["code"] = field(default="code", kw_only=True)
    column: str = "tests"
    credit: Credit = "all"
    tolerance: float = 1e-9
    case_seconds: float = 2.0
    total_seconds: float = 4.0
    memory_mib: int = 512
    sandbox: Kind = "auto"
    packages: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_names(self.packages)
        if self.case_seconds > self.total_seconds:
            raise ConfigError(
                f"Code needs case_seconds <= total_seconds, got {self.case_seconds:g} and {self.total_seconds:g}"
            )

    def prepare(self) -> None:
        """Choose the sandbox and try its walls (under two seconds).

        Raises:
            ConfigError: If nothing isolates on this machine; it says what to install.
        """
        choose(self.sandbox, self._bounds, self.packages)

    def stated(self, sample: Sample) -> str | None:
        """Return None: what a right program is, no row says.

        Raises:
            VerifierError: For cases that cannot be used.
        """
        cases = self._cases(sample)
        if self.sandbox == "monty" and not cases.stdin:
            raise VerifierError("monty answers no calls; it is for cases of stdin and stdout: take another sandbox")
        return None

    def __call__(self, sample: Sample) -> float:
        """Run the program on every case and count.

        Raises:
            VerifierError: For cases that cannot be read.
        """
        cases = self._cases(sample)
        program = program_of(sample, cases)
        if program is None:
            return 0.0
        sandbox, _ = choose(self.sandbox, self._bounds, self.packages)
        # One limit over all cases, so that a program with a hundred slow cases ends before
        # the grading deadline, which would make an error of what is the program's fault.
        until = time.monotonic() + self.total_seconds
        passed = self._by_stdin(sandbox, program, cases.stdin, until)
        passed += self._by_calls(_within(sandbox, max(0.1, until - time.monotonic())), program, cases)
        if cases.script is not None:
            passed.append(judge_isolated(_python_of(sandbox), program, cases.script, self.tolerance))
        return float(all(passed)) if self.credit == "all" else sum(passed) / len(passed)

    def _cases(self, sample: Sample) -> Cases:
        others = [name for name in _COLUMNS if name in sample.columns]
        if sample.columns.get(self.column) is None and others:
            raise VerifierError(f"there is no column '{self.column}'; set the reward's column = \"{others[0]}\"")
        tests = column(sample, self.column)
        if self.column == PRIVATE and PUBLIC in sample.columns:
            tests = with_public(tests, sample.columns[PUBLIC])
        return read_cases(tests, sample.columns, sample.prompt, importable(self.packages))

    @property
    def _bounds(self) -> SandboxLimits:
        seconds = math.ceil(self.total_seconds)
        return SandboxLimits(wall_seconds=self.total_seconds, cpu_seconds=seconds, memory_mib=self.memory_mib)

    def _by_stdin(self, sandbox: AnySandbox, program: str, cases: Sequence[StdinCase], until: float) -> list[bool]:
        passed: list[bool] = []
        for case in cases:
            left = min(self.case_seconds, until - time.monotonic())
            # With all or nothing the first failure decides, and the other cases need not run.
            if left <= 0 or (self.credit == "all" and False in passed):
                return passed + [False] * (len(cases) - len(passed))
            outcome = _sound(_within(sandbox, left, len(case.expected)).run_now(program, case.stdin))
            passed.append(outcome.cause is None and case.accepts(outcome.stdout, self.tolerance))
        return passed

    def _by_calls(self, sandbox: AnySandbox, program: str, cases: Cases) -> list[bool]:
        if not cases.called:
            return []
        # One process answers all calls: a start takes longer than most calls.
        sandbox = _python_of(sandbox)
        secret = secrets.token_hex(16)
        calls = [call for case in cases.called for call in case.calls]
        outcome = _sound(sandbox.run_now(harness(program, cases.setup, calls, secret)))
        answers = read_answers(outcome.stdout, secret, len(calls)) if outcome.cause is None else None
        if answers is None:
            return [False] * len(cases.called)
        return _judge(cases.called, answers, self.tolerance)


def _judge(cases: Sequence[Case], answers: Answers, tolerance: float) -> list[bool]:
    # The answers are in the order of the calls, so each case takes its own from the front.
    rest = iter(answers)
    return [case.accepts([next(rest) for _ in case.calls], tolerance) for case in cases]


def _within(sandbox: AnySandbox, seconds: float, expected: int = 0) -> AnySandbox:
    """Return the sandbox with this time, and room for an output of twice the expected characters."""
    # Some cases expect megabytes of output, more than the bound that ends runaway printing.
    kib = max(sandbox.bounds.output_kib, (2 * expected) >> 10)
    return replace(sandbox, bounds=replace(sandbox.bounds, wall_seconds=seconds, output_kib=kib))


def _python_of(sandbox: AnySandbox) -> LinuxSandbox:
    """Return the sandbox, which must know all of Python."""
    if isinstance(sandbox, Monty):
        raise VerifierError("monty knows too little of Python to answer calls: it is for cases of stdin and stdout")
    return sandbox


def _sound(outcome: Outcome) -> Outcome:
    """Return the outcome.

    Raises:
        VerifierError: If the program was never run: that is not its fault.
    """
    if outcome.cause == "refused":
        raise VerifierError(f"the sandbox did not run the program: {outcome.stderr}")
    return outcome

"""Measured training steps of a user's script on one rank of `samestep profile`."""

from __future__ import annotations

import time
from contextlib import ExitStack, redirect_stdout
from typing import Any

from torch.profiler import record_function

from samestep.data.batch import GlobalBatch, Microbatch
from samestep.data.loader import Loader
from samestep.engine.callbacks import Callback
from samestep.engine.engine import Engine
from samestep.engine.loss import Loss
from samestep.engine.step_stats import StepResult
from samestep.errors import InputError
from samestep.launcher.job import process_state, rank_and_size
from samestep.launcher.worker import EndOfScript, run_script
from samestep.runs.folder import run_directory
from samestep.tools.profile.measurements import Measurements, Step
from samestep.tools.profile.profile import CLOCK_MARK, RUN, TENSORBOARD, Plan, Script
from samestep.tools.profile.recorder import RankProfiler, SpanRecorder
from samestep.tools.profile.trial import gather


class _ScriptSteps(Callback):
    """Steps of the first engine of a script; the last step of the plan ends the script.

    Attributes:
        measurements: the measurements of all ranks, after the last step.
        is_stopped: a stop was requested.
        steps: completed steps.
    """

    def __init__(self, plan: Plan) -> None:
        self.measurements: Measurements | None = None
        self.is_stopped = False
        self.steps = 0
        self._plan = plan
        self._engine: Engine | None = None
        self._loaders: list[Loader] = []
        self._recorder: SpanRecorder | None = None
        self._profiler: RankProfiler | None = None
        self._context, self._step = ExitStack(), ExitStack()
        self._measured: list[Step] = []
        self._mark = 0.0
        self._largest: tuple[GlobalBatch, Loader] | None = None

    def loader_created(self, loader: Loader) -> None:
        self._loaders.append(loader)

    def engine_created(self, engine: Engine) -> None:
        if self._engine is not None:
            return
        self._engine, world, plan = engine, engine.world, self._plan
        self._recorder = SpanRecorder(world)
        self._recorder.engine_created(engine)
        if plan.traces(world.rank):
            folder = plan.folder / TENSORBOARD
            self._profiler = RankProfiler(world.rank, world.device, folder, warmup=plan.warmup, traced=plan.traced)
        self._context.enter_context(self._recorder.recording_collectives())
        self._change_phase(engine)
        self._begin_next()

    def begin_step(self, engine: Engine, batch: GlobalBatch) -> None:
        if engine is not self._engine:
            return
        recorder = self._of_engine()
        loader = batch.source if isinstance(batch.source, Loader) else self._loaders[-1]
        if self._largest is None or batch.size > self._largest[0].size:
            self._largest = batch, loader
        recorder.enter("other")
        recorder.begin_step(engine, batch)

    def begin_microbatch(self, microbatch: Microbatch) -> None:
        self._of_engine().begin_microbatch(microbatch)

    def end_microbatch(self, microbatch: Microbatch, outputs: Any, loss: Loss) -> None:
        self._of_engine().end_microbatch(microbatch, outputs, loss)

    def end_gradients(self, engine: Engine) -> None:
        self._of_engine().end_gradients(engine)

    def end_step(self, engine: Engine, result: StepResult) -> None:
        if engine is not self._engine:
            return
        recorder = self._of_engine()
        recorder.end_step(engine, result)
        self._step.close()
        self.steps += 1
        if result.stop:
            self.is_stopped = True
            self._end(engine)
        if self._profiler is not None and self.steps > self._first_traced():
            self._profiler.step()
        if self.steps == self._plan.steps:
            self._finish(engine)
        self._change_phase(engine)
        self._begin_next()

    def end_evaluation(self, engine: Engine, values: dict[str, float]) -> None:
        # The time of an evaluation between two steps is not a wait for data.
        if engine is self._engine:
            self._begin_next()

    def _of_engine(self) -> SpanRecorder:
        assert self._recorder is not None, "the engine exists"
        return self._recorder

    def _first_traced(self) -> int:
        """Return the number of steps before those with torch's profiler."""
        return self._plan.wait + self._plan.warmup + self._plan.active

    def _change_phase(self, engine: Engine) -> None:
        """Begin the measured, profiled or traced steps, if the next step is the first one of them."""
        plan, recorder, first = self._plan, self._of_engine(), self._first_traced()
        if self.steps == plan.wait + plan.warmup:
            engine.world.barrier()
            recorder.is_on = True
        if self.steps == first and plan.traced:
            self._measured = recorder.take_steps()
            recorder.is_on = False
            if self._profiler is not None:
                self._context.enter_context(self._profiler)
        if self.steps == first + plan.warmup and plan.traced:
            recorder.is_on = True
            with record_function(CLOCK_MARK):
                self._mark = time.perf_counter()

    def _begin_next(self) -> None:
        recorder = self._of_engine()
        # An opened step that never trained is dropped with its marks.
        self._step.pop_all()
        self._step.enter_context(recorder.step(self.steps + 1))
        recorder.enter("data")

    def _finish(self, engine: Engine) -> None:
        recorder = self._of_engine()
        recorder.is_on = False
        self._context.close()
        last = recorder.take_steps()
        measured, traced = (self._measured, last) if self._plan.traced else (last, [])
        assert self._largest is not None, "a plan has at least one active step"
        batch, loader = self._largest
        steps = (measured, traced, self._mark)
        self.measurements = gather(engine, loader, batch, self._plan, recorder, self._profiler, steps)
        self._end(engine)

    def _end(self, engine: Engine) -> None:
        engine.world.barrier()  # no rank ends while another needs it
        raise EndOfScript


def profile_script(script: Script, plan: Plan) -> Measurements | None:
    """Run a script on this rank until the steps of the plan are done; return None if a stop was requested.

    Raises:
        InputError: the script makes fewer steps.
    """
    rank, _ = rank_and_size()
    steps = _ScriptSteps(plan)
    process_state.is_experiment = True
    process_state.checkpoint_root = plan.scratch
    process_state.callbacks.append(steps)  # never removed: the process ends with the trial
    with (plan.folder / f"output-{rank}.log").open("w", encoding="utf-8") as output, redirect_stdout(output):
        run_script(script.path, script.arguments)
    if rank == 0 and process_state.run is not None:
        (plan.folder / RUN).write_text(str(run_directory(process_state.run)), encoding="utf-8")
    if steps.measurements is None and not steps.is_stopped:
        raise InputError(
            f"{script.path.name} made {steps.steps} of {plan.steps} steps with samestep.Engine",
            expected="a script that trains with samestep.start, Engine and loader, for at least so many steps",
            fix="train for more epochs, or reduce --active; for other scripts, torch.profiler works under samestep run",
            code="E_SCRIPT",
        )
    return steps.measurements

"""Environment variables that change results or speed behind one's back."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from samestep.runtime.processors import Processors
from samestep.tools.doctor.finding import Finding, Verdict, informs, passes, warns

_ON = r"(?i)1|true|yes|on"
_SLOW = "a run is much slower with it; it is for finding faults"
_DETOUR = "GPUs talk by a slower way with it; it is for finding faults"
_BITS = "other kernels give other last bits: results are the same only where all ranks and runs have the same setting"


@dataclass(frozen=True)
class Effect:
    """What a variable does that has such a value.

    Attributes:
        pattern: of the values that have the effect.
        does: what comes of it.
        verdict: `warn` where it changes results or speed much, else `info`.
    """

    name: str
    pattern: str
    does: str
    verdict: Verdict = "warn"


EFFECTS = (
    Effect("CUDA_LAUNCH_BLOCKING", _ON, _SLOW),
    Effect("PYTORCH_NO_CUDA_MEMORY_CACHING", _ON, _SLOW),
    Effect("TORCH_DISTRIBUTED_DEBUG", "(?i)detail", _SLOW),
    Effect("NCCL_P2P_DISABLE", _ON, _DETOUR),
    Effect("NCCL_SHM_DISABLE", _ON, _DETOUR),
    Effect("NCCL_IB_DISABLE", _ON, "machines talk over plain sockets with it, in place of InfiniBand"),
    Effect("NCCL_DEBUG", "(?i)info|trace|abort", "NCCL prints much; WARN is enough", "info"),
    Effect("NVIDIA_TF32_OVERRIDE", r".+", "it decides over TF32 in place of the recipe (step.tf32): results change"),
    Effect("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", _ON, "products are computed in TF32 without the recipe: results change"),
    Effect(
        "CUBLAS_WORKSPACE_CONFIG",
        r"(?!:4096:8$|:16:8$).*",
        "cuBLAS is not deterministic with it; :4096:8 is what Samestep sets where nothing is set",
    ),
    Effect(
        "OMP_PROC_BIND",
        r"(?i)true|close|master|primary|spread",
        "threads are tied to processors: several ranks on a machine may be tied to the same ones",
    ),
    Effect("KMP_AFFINITY", r".+", "threads are tied to processors: several ranks may be tied to the same ones", "info"),
    Effect("GOMP_CPU_AFFINITY", r".+", "threads are tied to processors: several ranks may be tied to the same ones"),
    Effect("PYTHONDEVMODE", r".+", "Python checks itself with it, and is slower", "info"),
    Effect("PYTHONMALLOC", r"(?i).*debug", _SLOW),
    Effect("PYTORCH_JIT", "0", "TorchScript is off with it", "info"),
    Effect("TORCH_COMPILE_DISABLE", _ON, "step.compile has no effect with it", "info"),
    Effect("TORCHDYNAMO_DISABLE", _ON, "step.compile has no effect with it", "info"),
    Effect("TORCH_NCCL_BLOCKING_WAIT", _ON, "every collective waits for its end: slower", "info"),
    Effect("ATEN_CPU_CAPABILITY", r".+", _BITS, "info"),
    Effect("ONEDNN_MAX_CPU_ISA", r".+", _BITS, "info"),
    Effect("DNNL_MAX_CPU_ISA", r".+", _BITS, "info"),
    Effect("MKL_CBWR", r".+", _BITS, "info"),
    Effect("MKL_DEBUG_CPU_TYPE", r".+", _BITS, "info"),
    Effect("CUDA_DEVICE_ORDER", "FASTEST_FIRST", "devices are numbered in another order than nvidia-smi shows", "info"),
    Effect("PYTHONHASHSEED", r".+", "harmless: no order of Samestep's depends on it", "info"),
)
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


def check_variables(variables: Mapping[str, str]) -> Iterator[Finding]:
    """What is set that has an effect; one line where nothing is."""
    found = [
        effect
        for effect in EFFECTS
        if effect.name in variables and re.fullmatch(effect.pattern, variables[effect.name].strip())
    ]
    for effect in found:
        value = f"is {variables[effect.name]}"
        if effect.verdict == "info":
            yield informs(effect.name, f"{value}: {effect.does}")
        else:
            yield warns(effect.name, value, rule=effect.does, do=f"unset {effect.name}, unless you want just that")
    if not any(effect.verdict == "warn" for effect in found):
        yield passes("environment variables", "none that changes results or speed behind one's back")


def check_thread_variables(variables: Mapping[str, str], processors: Processors) -> Iterator[Finding]:
    """Numbers of threads that libraries take from the environment."""
    for name in _THREADS:
        if name not in variables:
            continue
        text = variables[name].split(",")[0].strip()  # OpenMP: one number for each level of nesting
        if not text.isdecimal() or text == "0":
            yield warns(
                name,
                f"is {variables[name]}, which is no number of threads",
                rule="a number from 1 to that of processors",
                do=f"export {name}=1, or unset it",
            )
        elif int(text) > processors.usable:
            yield warns(
                name,
                f"is {text} where this process may use {processors.usable} "
                f"processor{'s' if processors.usable > 1 else ''}",
                rule="libraries start so many threads in every rank, and they wait for one another; what torch uses is "
                "step.threads of the recipe",
                do=f"export {name}=1, or unset it",
            )
        else:
            yield passes(name, text)

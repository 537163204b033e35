"""Real NCCL with 2 to 4 ranks on ONE GPU (or with real GPUs, if there are several), one JSON file of results.

NCCL refuses two ranks of a communicator with the same host hash and the same PCI address. `NCCL_HOSTID` replaces the
host of a rank, so every rank claims a host of its own; NCCL then connects them by its network transport, here sockets on
the loopback interface. Everything above the transport is the real thing: torch's ProcessGroupNCCL, its streams and
watchdog, communicators, groups of sends and receives, kernels, proxy threads. Ranks take turns on the GPU (time slices
of milliseconds), so that a message takes about 10 ms: times of communication mean nothing.

    PYTHONPATH=src:tests:benchmarks python3 gpu_nccl.py --output nccl.json --seconds 480

Run from benchmarks/ (it uses gpu_training.py). With --device cpu the same checks run over gloo, as a test of this file.
"""

from __future__ import annotations
import argparse, json, os, re, signal, statistics, subprocess, sys, tempfile, time, traceback
from pathlib import Path

HERE = Path(__file__).resolve().parent
CLAIMED = {
    "NCCL_NET": "Socket",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_FAMILY": "AF_INET",
    "NCCL_IB_DISABLE": "1",
    "NCCL_MNNVL_ENABLE": "0",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_RAS_ENABLE": "0",
    "NCCL_MAX_CTAS": "4",
    "NCCL_PROTO": "Simple",  # 9 ms an operation in place of 17 (LL) on a shared GPU
    "NCCL_DEBUG": "WARN",
}
SHARED = os.environ.get("SAMESTEP_NCCL_SHARED", "1") == "1"  # 0: one GPU per rank, for a machine with several GPUs


def claim(rank: int) -> None:
    """Make this rank a host of its own with GPU 0, in the eyes of NCCL and of Samestep."""
    if not SHARED or os.environ.get("SAMESTEP_NCCL_DEVICE") == "cpu":
        return
    os.environ.update(CLAIMED, NCCL_HOSTID=f"samestep-{rank}")
    import samestep.launcher.adoption as adoption
    import samestep.session as session

    for module in (session, adoption):
        module.first_gpu_index = lambda *_, **__: 0
        module.gpu_uuids = lambda device, count: [f"the GPU, as rank {rank}"]


def claim_worker() -> int:
    from samestep.launcher.job import process_state

    claim(process_state.worker.rank)
    return process_state.worker.rank


# ---- functions of ranks ------------------------------------------------------------------------------------------


def trainings(plans, device, strategy=None):
    import torch.distributed as dist
    from gpu_training import joined, train

    claim_worker()
    with joined(device, strategy, plans[0].reduction) as world:
        backend = dist.group.WORLD._get_backend(world.device).name()
        results = [train(plan, world) for plan in plans]
        return [(r.digest, list(r.losses), {k: v for k, v in r.weights.items()}) for r in results], backend


def failing(fault, device):
    import torch
    from gpu_training import CLASSES, Plan, build_training, joined, step, train

    rank = claim_worker()
    with joined(device) as world:
        train(Plan("small", 4, steps=2), world)
        if rank == 1:
            if fault == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if fault == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            if fault == "exception":
                raise ValueError("planted")
            if fault == "skip":
                time.sleep(3600)
            if fault == "memory":
                torch.empty(1 << 45, dtype=torch.uint8, device=world.device)
        # `label`: a wrong label in the loss of a step
        plan = Plan("small", 4)
        labels = torch.full((16,), CLASSES if fault == "label" and rank == 1 else 0, device=world.device)
        model, optimizer = build_training(plan, world)
        for _ in range(4):
            step(model, optimizer, torch.ones(16, 3, 32, 32, device=world.device), labels, plan)


def host_times(device):
    """Host time of the calls, without waits: what a hook of DDP pays on the thread of autograd."""
    import torch, torch.distributed as dist
    from samestep.session import start

    rank = claim_worker()
    with start(device=device) as world:
        size, result = world.size, {}
        buffer = torch.zeros(1 << 16, device=world.device)
        other, rows = torch.zeros_like(buffer), torch.zeros(size * len(buffer), device=world.device)
        sync = torch.cuda.synchronize if device == "cuda" else (lambda: None)
        calls = {
            "batch_isend_irecv, wait": lambda: [
                w.wait()
                for w in dist.batch_isend_irecv(
                    [
                        dist.P2POp(dist.irecv, other, group_peer=rank ^ 1),
                        dist.P2POp(dist.isend, buffer, group_peer=rank ^ 1),
                    ]
                )
            ],
            "all_to_all_single": lambda: dist.all_to_all_single(other, buffer),
            "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(rows, buffer),
            "all_reduce": lambda: dist.all_reduce(other),
            "all_gather of a list": lambda: dist.all_gather(list(rows.view(size, -1)), buffer),
        }
        for name, call in calls.items():
            try:
                call()
                sync()
                times = []
                for _ in range(12):
                    sync()
                    began = time.perf_counter()
                    call()
                    times.append(time.perf_counter() - began)
                sync()
                result[name] = round(1e6 * statistics.median(times), 1)
            except Exception as error:
                result[name] = f"{type(error).__name__}: {str(error)[:120]}"
        return result


# ---- checks ------------------------------------------------------------------------------------------------------


def launch(function, *arguments, ranks):
    import importlib
    import samestep

    function = getattr(importlib.import_module("gpu_nccl"), function.__name__)  # by the name that a rank imports
    return samestep.launch(function, *arguments, processes=ranks, preload=("gpu_training", "gpu_nccl"), hang_after=40)


def check_facts(device):
    """Versions, and the 16-byte rule of NCCL's copies: one rank, messages to itself, no trick."""
    import torch, torch.distributed as dist

    result = {"torch": torch.__version__}
    if device != "cuda":
        return result
    result |= {
        "device": torch.cuda.get_device_name(),
        "gpus": torch.cuda.device_count(),
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
    }
    smi = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True)
    result["topology"] = smi.stdout[-3000:]
    asked = "index,name,uuid,pci.bus_id,driver_version,memory.total,mig.mode.current,ecc.mode.current,clocks.max.sm,power.limit"
    smi = subprocess.run(
        ["nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader"], capture_output=True, text=True
    )
    result["devices"] = smi.stdout.splitlines()
    result["processors"] = len(os.sched_getaffinity(0))
    result["/dev/shm, GiB free"] = round(os.statvfs("/dev/shm").f_bavail * os.statvfs("/dev/shm").f_frsize / 2**30, 1)
    result["environment"] = {
        k: v for k, v in sorted(os.environ.items()) if k.startswith(("NCCL_", "TORCH_", "CUDA_", "PYTORCH_", "OMP_"))
    }
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    dist.all_reduce(torch.zeros(1, device="cuda"))
    elements, rates = 16 << 20, {}
    source, target = (torch.zeros(elements + 64, device="cuda") for _ in range(2))
    for offset in (0, 1, 2, 4):

        def send():
            for work in dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.irecv, target[offset : offset + elements], 0),
                    dist.P2POp(dist.isend, source[offset : offset + elements], 0),
                ]
            ):
                work.wait()

        send()
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(5):
            send()
        torch.cuda.synchronize()
        rates[f"offset of {4 * offset} bytes, GB/s"] = round(5 * 4 * elements / (time.perf_counter() - began) / 1e9, 1)
    result["message of 64 MB to itself"] = rates
    times = []
    for _ in range(50):
        torch.cuda.synchronize()
        began = time.perf_counter()
        send()
        times.append(time.perf_counter() - began)
    result["host time of a batch of one send and one receive, us"] = round(1e6 * statistics.median(times), 1)
    dist.destroy_process_group()
    return result


def raw_rank(rank, size, port):
    """The collectives and messages of torch, without Samestep."""
    os.environ.update(CLAIMED, NCCL_HOSTID=f"raw-{rank}")
    import torch, torch.distributed as dist
    from datetime import timedelta

    torch.cuda.set_device(0)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=50),
    )
    device, out = torch.device("cuda", 0), {}
    began = time.perf_counter()
    x = torch.full((1000,), float(rank + 1), device=device)
    dist.all_reduce(x)
    out["first all_reduce, s"] = round(time.perf_counter() - began, 2)
    assert x[0].item() == size * (size + 1) / 2
    for elements in (1 << 10, 1 << 20, 4 << 20):
        send, receive = torch.full((elements,), float(rank), device=device), torch.empty(elements, device=device)

        def exchange():
            for work in dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.irecv, receive, group_peer=(rank - 1) % size),
                    dist.P2POp(dist.isend, send, group_peer=(rank + 1) % size),
                ]
            ):
                work.wait()

        exchange()
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(4):
            exchange()
        torch.cuda.synchronize()
        out[f"exchange of {4 * elements} bytes, ms"] = round(250 * (time.perf_counter() - began), 1)
        assert receive[0].item() == (rank - 1) % size and receive[-1].item() == (rank - 1) % size
    y = torch.arange(size, device=device, dtype=torch.float32)
    z = torch.empty_like(y)
    dist.all_to_all_single(z, y)
    assert z.tolist() == [float(rank)] * size
    rows = torch.empty(size * 4, device=device)
    dist.all_gather_into_tensor(rows, torch.full((4,), float(rank), device=device))
    assert rows.view(size, 4)[:, 0].tolist() == list(map(float, range(size)))
    group = dist.new_group(list(range(size)))
    a = torch.ones(8, device=device)
    dist.all_reduce(a, group=group)
    dist.barrier()
    out["backend"] = dist.group.WORLD._get_backend(device).name()
    torch.cuda.synchronize()
    dist.destroy_process_group()
    print("RAW " + json.dumps(out), flush=True)


def check_raw(device):
    if device != "cuda" or not SHARED:
        return {}
    import socket

    results = {}
    for size in (2, 4):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        ranks = [
            subprocess.Popen(
                [sys.executable, __file__, "--raw", str(r), str(size), str(port)],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for r in range(size)
        ]
        outputs = []
        for process in ranks:
            try:
                outputs.append(process.communicate(timeout=70)[0])
            except subprocess.TimeoutExpired:
                process.kill()
                outputs.append("TIMEOUT " + process.communicate()[0])
        lines = [next((l for l in o.splitlines() if l.startswith("RAW ")), None) for o in outputs]
        if None in lines:
            raise RuntimeError(f"{size} ranks: " + "\n---\n".join(o[-1500:] for o in outputs))
        results[f"{size} ranks"] = json.loads(lines[0][4:])
    return results


def _plans(device):
    from gpu_training import Plan

    models = ("resnet18", "tokens", "gpt", "small") if device == "cuda" else ("tokens", "small")
    plans = {f"{m}, exact": Plan(m, 8) for m in models}
    plans["gpt, exact, bf16"] = Plan("gpt", 8, is_bf16=True)
    return plans


def check_bits(device, ranks=None):
    """One digest per plan on 1, 2, 3 and 4 ranks."""
    plans, digests, backends, seconds = _plans(device), {}, {}, {}
    most = 4 if SHARED else gpus()
    for n in ranks or (sorted({1, 2, 3, 4, most} & set(range(1, most + 1))) if device == "cuda" else (1, 2)):
        began = time.monotonic()
        results, backends[n] = launch(trainings, list(plans.values()), device, ranks=n)
        seconds[n] = round(time.monotonic() - began, 1)
        for name, (digest, _, _) in zip(plans, results):
            digests.setdefault(name, {})[n] = digest
    failures = [f"{name}: {d}" for name, d in digests.items() if len(set(d.values())) > 1]
    if device == "cuda" and any(b != "nccl" for n, b in backends.items()):
        failures.append(f"backends {backends}")
    return {"digests": digests, "backends": backends, "seconds": seconds, "failures": failures}


def check_layouts(device):
    """Divided models in float64, compared with one rank; `pp` has no test on a GPU yet."""
    from gpu_training import Plan
    from samestep.config import MeshConfig, StrategyConfig

    plans = [Plan("gpt", 4, is_double=True, reduction="fast")]
    strategies = {
        "fsdp of 2": (StrategyConfig(name="fsdp"), 2),
        "hsdp of 2 x 2": (StrategyConfig(name="hsdp", mesh=MeshConfig(replicate=2, shard=2)), 4),
        "tp of 2": (StrategyConfig(name="tp"), 2),
        "pp of 2 (tied weights)": (StrategyConfig(name="pp", mesh=MeshConfig(pipeline=2)), 2),
        "pp of 4 (tied weights)": (StrategyConfig(name="pp", mesh=MeshConfig(pipeline=4)), 4),
        "ddp x pp": (StrategyConfig(name="pp", mesh=MeshConfig(pipeline=2, replicate=2)), 4),
    }
    expected, _ = launch(trainings, plans, device, ranks=1)
    numbers, failures = {}, []
    for name, (strategy, n) in strategies.items():
        if n > (2 if device == "cpu" else 4 if SHARED else gpus()):
            continue
        began = time.monotonic()
        try:
            found, backend = launch(trainings, plans, device, strategy, ranks=n)
        except Exception as error:
            failures.append(f"{name}: {type(error).__name__}: {str(error)[:600]}")
            continue
        far = max(
            float((found[0][2][k].double() - v.double()).abs().max() / v.double().abs().max().clamp(min=1e-3))
            for k, v in expected[0][2].items()
        )
        numbers[name] = {
            "largest difference in float64": far,
            "backend": backend,
            "seconds": round(time.monotonic() - began, 1),
        }
        if far > 1e-10:
            failures.append(f"{name}: {numbers[name]}")
    return {"layouts": numbers, "failures": failures}


def check_faults(device):
    """What is said, and after how many seconds, when a rank fails while the others wait in NCCL's kernels."""
    from samestep.launcher.failure import RankError

    wanted = {
        "kill": "SIGKILL",
        "exception": "planted",
        "label": "assert|bounds|range|targets",
        "memory": "out of memory",
        "stop": "stopped by a signal",
        "skip": "hang",
    }
    numbers, failures = {}, []
    for fault, times in {"kill": 1, "exception": 1, "label": 5, "memory": 1, "stop": 1, "skip": 1}.items():
        if device == "cpu" and fault in ("memory", "stop", "skip"):
            continue
        for number in range(times):
            began, key = time.monotonic(), f"{fault}{'' if times == 1 else f' {number}'}"
            try:
                launch(failing, fault, device, ranks=3 if SHARED or device == "cpu" else min(3, gpus()))
                failures.append(f"{key}: the launch did not fail")
            except RankError as error:
                text = str(error)
                numbers[key] = {
                    "seconds": round(time.monotonic() - began, 1),
                    "rank": error.failure.rank,
                    "code": error.failure.code,
                    "signal": error.failure.by_signal,
                    "first line": text.splitlines()[0][:200],
                }
                if error.failure.rank != 1 or not re.search(wanted[fault], text, re.I):
                    failures.append(f"{key}: {numbers[key]}")
    return {"faults": numbers, "failures": failures}


def check_host(device):
    return {"host time, us, 2 ranks": launch(host_times, device, ranks=2)}


def links(device, sizes):
    """Times of collectives and messages on the GPUs of this machine, and the memory that NCCL takes for each kind."""
    import torch, torch.distributed as dist
    from samestep.reduce.tree import MicrobatchTree, tree_all_reduce
    from samestep.session import start

    rank = claim_worker()
    result = {}
    with start(device=device) as world:
        n, cuda = world.size, device == "cuda"
        sync = torch.cuda.synchronize if cuda else (lambda: None)

        def used():
            if not cuda:
                return 0
            free, total = torch.cuda.mem_get_info()
            return round((total - free - torch.cuda.memory_reserved()) / 2**20)

        def timed(call, repeats=8):
            call()
            sync()
            dist.barrier()
            began = time.perf_counter()
            for _ in range(repeats):
                call()
            host = (time.perf_counter() - began) / repeats
            sync()
            return (time.perf_counter() - began) / repeats, host

        memory = {"before": used()}
        small = torch.zeros(1024 * n, device=world.device)
        dist.all_reduce(small)
        sync()
        memory["after all_reduce"] = used()
        distances = [d for d in (1, 2, 4) if d < n and n & (n - 1) == 0] or ([1] if n > 1 else [])

        def exchange(send, receive, peer):
            for work in dist.batch_isend_irecv(
                [dist.P2POp(dist.irecv, receive, group_peer=peer), dist.P2POp(dist.isend, send, group_peer=peer)]
            ):
                work.wait()

        if n & (n - 1) == 0:
            exchange(small[:512], small[512:1024], rank ^ 1)
            sync()
            memory["after the first exchange with one rank"] = used()
        target = torch.empty_like(small)
        dist.all_to_all_single(target, small)
        sync()
        memory["after all_to_all"] = used()
        tree = MicrobatchTree(n, n)
        for megabytes in sizes:
            count = int(megabytes * 2**18) // (4 * n) * 4 * n
            x, y = torch.zeros(count + 4, device=world.device), torch.zeros(count + 4, device=world.device)
            rows = torch.empty(count, device=world.device)
            calls = {
                "all_reduce": lambda: dist.all_reduce(x[:count]),
                "all_to_all_single": lambda: dist.all_to_all_single(y[:count], x[:count]),
                "all_gather_into_tensor of 1/N": lambda: dist.all_gather_into_tensor(rows, x[: count // n]),
                "tree of exact": lambda: tree_all_reduce(world, tree, [x[:count]], x[:count]),
                "tree of exact, odd length": lambda: tree_all_reduce(world, tree, [x[: count - 3]], x[: count - 3]),
            }
            for d in distances:
                calls[f"exchange at distance {d}"] = lambda d=d: exchange(x[:count], y[:count], rank ^ d)
            if distances:
                calls["exchange at distance 1, 4 bytes off"] = lambda: exchange(
                    x[1 : count + 1], y[1 : count + 1], rank ^ 1
                )
            for name, call in calls.items():
                try:
                    whole, host = timed(call)
                    result[f"{megabytes} MB, {name}"] = {
                        "us": round(1e6 * whole),
                        "host us": round(1e6 * host),
                        "GB/s": round(4 * count / whole / 1e9, 1),
                    }
                except Exception as error:
                    result[f"{megabytes} MB, {name}"] = f"{type(error).__name__}: {str(error)[:150]}"
        result["MiB outside of torch's allocator"] = memory
    return result


def gpus():
    import torch

    return torch.cuda.device_count()


def check_links(device):
    n = gpus() if device == "cuda" else 2
    if n < 2:
        return {"skipped": "one GPU"}
    sizes = (0.0625, 1, 12, 25, 100) if device == "cuda" else (0.0625,)
    with tempfile.TemporaryDirectory() as folder:  # transports, channels and network of NCCL, in its own words
        os.environ.update(
            NCCL_DEBUG="INFO", NCCL_DEBUG_SUBSYS="INIT,GRAPH,P2P,SHM,NET", NCCL_DEBUG_FILE=f"{folder}/%h.%p"
        )
        results = {
            f"{k} GPUs": launch(links, device, sizes, ranks=k) for k in sorted({2, n} | ({3} if n > 3 else set()))
        }
        wanted = re.compile(
            r"channels|via (P2P|SHM|NET)|Using network|NVLS|GDR|P2P is disabled|NCCL version|NCCL_\w+ set by"
        )
        lines = [
            re.sub(r"^\S+ ", "", line.strip())[:160]
            for file in sorted(Path(folder).iterdir())
            for line in file.read_text(errors="replace").splitlines()
            if wanted.search(line)
        ]
    results["NCCL says"] = list(dict.fromkeys(lines))[:80]
    return results


CHECKS = {"facts": 60, "raw": 150, "host": 60, "bits": 200, "layouts": 200, "links": 90, "faults": 300}


def main():
    if sys.argv[1:2] == ["--raw"]:
        return raw_rank(*map(int, sys.argv[2:5]))
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--output", type=Path, default=Path("nccl.json"))
    parser.add_argument("--seconds", type=float, default=480)
    parser.add_argument("--only", nargs="+", default=list(CHECKS))
    parser.add_argument("--check")
    options = parser.parse_args()
    os.environ["SAMESTEP_NCCL_DEVICE"] = options.device
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    if options.check:
        try:
            result = globals()[f"check_{options.check}"](options.device)
        except Exception as error:
            traceback.print_exc()
            result = {"failures": [f"{type(error).__name__}: {str(error)[:3000]}"]}
        options.output.write_text(json.dumps(result))
        return
    deadline, lines = time.monotonic() + options.seconds, {}
    for name in options.only:
        limit = min(CHECKS[name], deadline - time.monotonic())
        if limit < 10:
            lines[name] = {"skipped": "no time left"}
            continue
        with tempfile.TemporaryDirectory() as folder:
            result, log, began = Path(folder) / "r.json", Path(folder) / "log", time.monotonic()
            with log.open("wb") as output:
                process = subprocess.Popen(
                    [sys.executable, __file__, "--device", options.device, "--check", name, "--output", str(result)],
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
                try:
                    process.wait(limit)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
            text = log.read_text(errors="replace")
            line = (
                json.loads(result.read_text()) if result.exists() else {"failures": [f"no result within {limit:.0f} s"]}
            )
            line["seconds of the check"] = round(time.monotonic() - began, 1)
            if line.get("failures"):
                line["log"] = text[-4000:]
        lines[name] = line
        print(name, "FAIL" if line.get("failures") else "ok", json.dumps(line)[:1500], flush=True)
        options.output.write_text(json.dumps(lines, indent=1))


if __name__ == "__main__":
    main()

"""GPUs as the driver's command prints them, and what is judged of them. Not run on hardware yet."""

import pytest

from samestep.tools.doctor.devices import check_gpus, check_peers, check_tenants, check_visible
from samestep.tools.doctor.links import check_bandwidth, nominal
from samestep.tools.doctor.nvidia import Card, Nvidia, Tenant, cards_of, links_of, tenants_of
from samestep.tools.doctor.probe import has_kernels
from samestep.tools.doctor.probe_facts import Met, TorchView

GIB = 1 << 30
QUERY = """\
GPU-aaaa, NVIDIA A100-SXM4-80GB, 550.54.15, 81920, 4, 4, 16
GPU-bbbb, NVIDIA A100-SXM4-80GB, 550.54.15, 81920, 40960, 4, [N/A]
"""
APPS = "4242, GPU-bbbb, 40950\n[N/A], GPU-bbbb, 3\n"
TOPOLOGY = """\
\t\x1b[4mGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\x1b[0m
GPU0\t X \tNV12\tPXB\t0-31\t0
GPU1\tNV12\t X \tSYS\t0-31\t0
NIC0\tPXB\tSYS\t X
"""
A100 = Card("GPU-a", "NVIDIA A100-SXM4-80GB", 80 * GIB, 0, 4, 16)


def two(link: str, card: Card = A100) -> Nvidia:
    return Nvidia("550.54.15", (card, card), (), (("X", link), (link, "X")))


def met(rate: float, device: str = "cuda") -> Met:
    """Two ranks whose links carried so many bytes a second."""
    return Met(2, device, None, seconds=1.0, sent=int(rate), resident=0)


def verdicts(findings: object) -> dict[str, str]:
    return {finding.name: finding.verdict for finding in findings}  # type: ignore[attr-defined]


def test_answers_of_the_driver() -> None:
    driver, cards = cards_of(QUERY)
    assert driver == "550.54.15"
    assert cards[0] == Card("GPU-aaaa", "NVIDIA A100-SXM4-80GB", 81920 << 20, 4 << 20, 4, 16)
    assert (cards[1].used, cards[1].lanes) == (40 * GIB, None)
    assert tenants_of(APPS) == (Tenant(4242, "GPU-bbbb", 40950 << 20),)
    assert links_of(TOPOLOGY, 2) == (("X", "NV12"), ("NV12", "X"))


def test_answers_that_cannot_be_read() -> None:
    assert cards_of("No devices were found\n") == (None, ())
    assert tenants_of("") == ()
    assert links_of("what?\n", 2) == ()


@pytest.mark.parametrize(
    ("setting", "verdict"),
    [("0,1", "pass"), ("1", "pass"), ("GPU-aaaa", "pass"), ("0,2", "fail"), ("1,1", "fail"), (" ", "warn")],
)
def test_visible(setting: str, verdict: str) -> None:
    assert verdicts(check_visible({"CUDA_VISIBLE_DEVICES": setting}, two("SYS"))) == {"CUDA_VISIBLE_DEVICES": verdict}


def test_gpus() -> None:
    assert verdicts(check_gpus(Nvidia(), None)) == {"GPUs": "info"}
    assert verdicts(check_gpus(two("SYS"), TorchView(gpus=("A100", "A100")))) == {"GPUs": "pass"}
    assert verdicts(check_gpus(two("SYS"), TorchView(failed="no device")))["GPUs"] == "fail"
    assert verdicts(check_gpus(Nvidia(), TorchView(failed="no driver")))["GPUs"] == "info"
    assert verdicts(check_gpus(Nvidia("550", failed="mismatch"), None))["nvidia-smi"] == "fail"
    assert verdicts(check_gpus(two("SYS"), TorchView(gpus=("B200",), too_new=("B200",))))["kernels for these GPUs"] == (
        "fail"
    )


def test_peers() -> None:
    assert list(check_peers(TorchView(gpus=("A100",)))) == []
    assert verdicts(check_peers(TorchView(gpus=("A100", "A100")))) == {"peer-to-peer access": "pass"}
    (found,) = check_peers(TorchView(gpus=("A100", "A100"), apart=((0, 1), (1, 0))))
    assert (found.verdict, found.value) == ("warn", "not from GPU 0 to 1, 1 to 0")


def test_tenants() -> None:
    assert verdicts(check_tenants(two("SYS"))) == {"memory of GPUs": "pass"}
    _, cards = cards_of(QUERY)
    (found,) = check_tenants(Nvidia("550", cards, tenants_of(APPS)))
    assert (found.name, found.verdict) == ("memory of GPU 1", "warn")
    assert "process 4242" in found.value
    (found,) = check_tenants(Nvidia("550", cards))
    assert "cannot be seen" in found.value


def test_links() -> None:
    assert nominal(two("NV12")) == ("NVLink", 300e9)
    kind, rate = nominal(two("SYS")) or ("", 0.0)
    assert (kind, round(rate / 1e9, 1)) == ("PCI Express", 31.5)
    assert nominal(two("SYS", Card("GPU-a", "?", 0, 0))) is None


@pytest.mark.parametrize(
    ("link", "rate", "verdict"),
    [("NV12", 230e9, "pass"), ("NV12", 20e9, "warn"), ("SYS", 10e9, "pass"), ("SYS", 1e9, "warn")],
)
def test_bandwidth(link: str, rate: float, verdict: str) -> None:
    assert verdicts(check_bandwidth(met(rate), two(link))) == {"all-reduce": verdict}


def test_bandwidth_that_nobody_can_judge() -> None:
    assert verdicts(check_bandwidth(met(1.0), Nvidia("550"))) == {"all-reduce": "info"}
    assert verdicts(check_bandwidth(met(1.0, "cpu"), Nvidia())) == {"all-reduce": "info"}
    assert met(8e9).bandwidth == 8e9
    assert Met(4, "cuda", None, 1.0, 1000, 0).bandwidth == 1500.0


@pytest.mark.parametrize(
    ("capability", "built", "runs"),
    [
        ((8, 0), ["sm_80", "sm_90"], True),
        ((8, 6), ["sm_80", "sm_90"], True),
        ((9, 0), ["sm_80", "sm_90a"], True),
        ((12, 0), ["sm_80", "sm_90"], False),
        ((12, 0), ["sm_90", "compute_90"], True),
        ((7, 0), ["sm_75", "sm_80"], False),
        ((8, 0), [], False),
    ],
)
def test_kernels(capability: tuple[int, int], built: list[str], runs: bool) -> None:
    assert has_kernels(capability, built) == runs

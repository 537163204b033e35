"""Job for tests of `samestep submit`."""

from samestep.tools.submit.job import Job

JOB = Job(
    subject="digits",
    text=None,
    arguments=("epochs=1", "optimizer.options.lr=0.05"),
    name="first",
    nodes=4,
    gpus=2,
    minimum=8,
    maximum=8,
    runs="all runs",
    folder="/home/me/my work",
    out="/home/me/my work",
    python="/opt/python",
    image="registry/samestep:1",
    volume="claim",
    gpu_name="H100",
)

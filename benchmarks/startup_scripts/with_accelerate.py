"""Usage: `accelerate launch ... with_accelerate.py MARK`."""

import sys

from accelerate import Accelerator
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from workload import BATCH_SIZE, build_dataset, build_net, build_optimizer, first_step_done


def main(mark: str) -> None:
    accelerator = Accelerator(cpu=True)
    model = build_net()
    loader = DataLoader(build_dataset(), batch_size=BATCH_SIZE // accelerator.num_processes, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, build_optimizer(model), loader)
    for inputs, targets in loader:
        optimizer.zero_grad()
        accelerator.backward(cross_entropy(model(inputs), targets))
        optimizer.step()
        if accelerator.is_main_process:
            first_step_done(mark, accelerator.num_processes)
        break
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main(sys.argv[1])

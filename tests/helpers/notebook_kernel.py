"""Runs cells, one per file of the command line, in a Jupyter kernel, and prints their output."""

import sys
from pathlib import Path
from typing import Any

from jupyter_client.manager import start_new_kernel


def show(message: dict[str, Any]) -> None:
    content = message["content"]
    if message["msg_type"] == "stream":
        print(content["text"], end="")
    elif message["msg_type"] == "execute_result":
        print(content["data"]["text/plain"])
    elif message["msg_type"] == "error":
        print(content["ename"], content["evalue"], *content["traceback"], sep="\n")


def main() -> None:
    manager, client = start_new_kernel(kernel_name="python3")
    try:
        for path in sys.argv[1:]:
            client.execute_interactive(Path(path).read_text(encoding="utf-8"), timeout=90, output_hook=show)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


if __name__ == "__main__":
    main()

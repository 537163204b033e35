"""Requests to stop."""

import os
import signal
import time

from samestep.distributed.stop_request import StopRequest


def test_signal_is_a_request_in_the_process_alone_and_ends_its_forks() -> None:
    stop = StopRequest()
    reader, writer = os.pipe()
    with stop.handling([signal.SIGTERM]):
        child = os.fork()
        if child == 0:
            os.write(writer, b"r")
            time.sleep(60)
            os._exit(0)
        os.read(reader, 1)  # Python forgets a signal that arrives in the fork itself
        os.kill(child, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
        assert not stop()
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop()
    os.close(reader)
    os.close(writer)

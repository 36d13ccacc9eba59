import threading

import pytest

from torchcram.experiments.files import locked


def test_one_waits_for_another_to_leave_a_folder(tmp_path):
    inside, leave, entered = threading.Event(), threading.Event(), threading.Event()

    def first():
        with locked(tmp_path):
            inside.set()
            leave.wait(60)

    def second():
        with locked(tmp_path, patience=60):
            entered.set()

    threads = [threading.Thread(target=work) for work in (first, second)]
    threads[0].start()
    assert inside.wait(60)
    threads[1].start()
    with (
        pytest.raises(ValueError, match="another process is working in this folder"),
        locked(tmp_path, patience=0.3),
    ):
        pass
    assert not entered.is_set()
    leave.set()
    assert entered.wait(60)
    for thread in threads:
        thread.join()

import pytest
from runs import digits, one_thread, recipe, run

GIVEN = recipe("compress.to=[global:0.5, int4]", "compress.calibration_samples=100", epochs=1)


@pytest.fixture(scope="session")
def data():
    return digits()


@pytest.fixture(scope="session")
def trained(tmp_path_factory, data):
    """A finished training of digits, in its folder."""
    folder = tmp_path_factory.mktemp("trained")
    return folder, run(folder, GIVEN, data)


@pytest.fixture(autouse=True)
def _one_thread():
    with one_thread():
        yield

import pytest
from phone_parts import open_parts


@pytest.fixture(scope="session")
def parts(phone_packages, tmp_path_factory):
    with open_parts(phone_packages, tmp_path_factory.mktemp("phone")) as opened:
        yield opened

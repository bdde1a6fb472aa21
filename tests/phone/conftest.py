import subprocess

import pytest
from phone_parts import open_parts


@pytest.fixture(scope="session")
def parts(phone_packages, tmp_path_factory):
    with open_parts(phone_packages, tmp_path_factory.mktemp("phone")) as opened:
        yield opened


@pytest.fixture(scope="session")
def built_page(phone_packages):
    """The page, bundled from the sources as they are."""
    subprocess.run(["node", "build.mjs"], cwd=phone_packages, check=True, timeout=60)

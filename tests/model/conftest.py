import pytest
from tiny_models import tiny


@pytest.fixture(params=["gpt2", "modern"])
def name(request):
    return request.param


@pytest.fixture
def model(name):
    """Each of the two models that every contract is tested on."""
    return tiny(name)

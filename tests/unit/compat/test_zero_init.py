"""Settings of `zero.Init` from a config."""

import pytest
import torch

from mpispeed import zero
from mpispeed.base.errors import ConfigError, UsageError
from mpispeed.compat.zero_init import settings_of
from mpispeed.sharding import init


def test_a_config_without_a_dtype_leaves_all_as_it_is():
    settings = settings_of({"train_batch_size": 4})
    assert (settings.dtype, settings.override_module_apply, settings.device) == (None, True, None)


def test_dtype_and_folder_come_from_the_config(tmp_path):
    param = {"device": "nvme", "nvme_path": str(tmp_path)}
    config = {
        "train_batch_size": 4,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "offload_param": param},
    }
    settings = settings_of(config)
    assert settings.dtype == torch.bfloat16
    assert (settings.device, str(settings.nvme_path)) == ("nvme", str(tmp_path))


def test_the_face_is_the_plain_context_with_more_arguments():
    assert issubclass(zero.Init, init.Init)
    assert not zero.Init(enabled=False).enabled


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"remote_device": "disk"}, UsageError, "remote_device='disk' is not available"),
        ({"dtype": torch.int8}, UsageError, "dtype torch.int8 is not possible"),
        ({"config": {}, "config_dict_or_path": {}}, ConfigError, "keep the first"),
    ],
)
def test_arguments_are_checked_in_the_face(arguments, error, text):
    with pytest.raises(error, match=text):
        zero.Init(**arguments)

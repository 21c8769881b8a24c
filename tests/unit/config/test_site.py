"""The site's file of defaults: under users' settings, with locked keys; refused where others could write it."""

import json
import os
import pickle
from pathlib import Path

import pytest

from mpispeed.base import site_file
from mpispeed.base.errors import ConfigError
from mpispeed.base.site_file import NONE, VARIABLE, SiteFile, current, hold, read_for_job, read_site_file, set_aside
from mpispeed.config import explain, load, load_for_run
from mpispeed.config.inference import InferenceConfig
from mpispeed.config.inference_load import resolve
from mpispeed.config.offload import OffloadParam
from mpispeed.config.zero import ZeroOptimization
from tests.helpers.site_files import written_sites

TEXT = """
locked = ["zero_optimization.stage", "zero_optimization.stage3_prefetch_bucket_size", "wall_clock_breakdown"]
profile = "mpich"
[config]
gradient_clipping = 1.0
bf16 = {enabled = true}
optimizer = {type = "AdamW", params = {lr = 0.1, weight_decay = 0.2}}
[config.zero_optimization]
stage = 2
stage3_prefetch_bucket_size = 1000
allgather_bucket_size = "4e6"
[environment]
FI_MR_CACHE_MONITOR = "userfaultfd"
NCCL_SOCKET_IFNAME = "hsn"
"""
MICRO = {"train_micro_batch_size_per_gpu": 2}


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A function that writes the file, and its path."""
    yield from written_sites(tmp_path, monkeypatch, TEXT)


def test_defaults_are_under_what_users_give(site):
    path = site()
    given = {
        **MICRO, "gradient_clipping": 0.5, "zero_optimization": {"stage": 2, "allgather_bucket_size": "auto"},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.3}},
    }  # fmt: skip
    loaded = load(given)
    config = loaded.config
    assert config.gradient_clipping == 0.5
    assert config.bf16.enabled
    assert config.zero_optimization.prefetch_bucket_size == 1000
    assert config.zero_optimization.allgather_bucket_size == 4_000_000
    assert config.optimizer.params == {"lr": 0.3, "weight_decay": 0.2}
    origins = {row.path: row.origin for row in explain(loaded, 2)}
    of_site = f"site file {path}"
    assert origins["gradient_clipping"] == origins["zero_optimization.stage"] == "given"
    assert origins["bf16.enabled"] == origins["zero_optimization.allgather_bucket_size"] == of_site
    assert origins["optimizer.params.weight_decay"] == of_site
    assert "allgather_bucket_size" in given["zero_optimization"]


def test_an_optimizer_of_another_type_takes_no_parameters_of_the_site(site):
    site()
    assert load({**MICRO, "optimizer": {"type": "Lion"}}).config.optimizer.params == {}


def test_an_optimizer_of_another_type_keeps_locked_parameters(site):
    text = 'optimizer = {type = "AdamW", params = {lr = 0.1, weight_decay = 0.2}}'
    path = site(f'locked = ["optimizer.params.weight_decay"]\n[config]\n{text}\n')
    loaded = load({**MICRO, "optimizer": {"type": "Lion"}})
    assert loaded.config.optimizer.params == {"weight_decay": 0.2}
    assert loaded.origins["optimizer.params.weight_decay"] == f"site file {path}"
    assert load(MICRO).config.optimizer.params == {"lr": 0.1, "weight_decay": 0.2}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"zero_optimization": {"stage": 3}}, "zero_optimization.stage: is locked at 2 by {site} of "),
        ({"zero_optimization": 1}, "is locked"),
        (
            {"zero_optimization": {"prefetch_bucket_size": 7}},
            "zero_optimization.prefetch_bucket_size: is locked",
        ),
        (
            {"zero_optimization": {"stage3_prefetch_bucket_size": 7}},
            "stage3_prefetch_bucket_size: is locked at 1000",
        ),
        ({"wall_clock_breakdown": True}, "wall_clock_breakdown: is locked by {site} of "),
    ],
)
def test_locked_settings_stay(site, change, told):
    path = site()
    for read in (load, load_for_run):
        with pytest.raises(ConfigError) as caught:
            read({**MICRO, **change})
        assert told.format(site=path) in str(caught.value)


def test_what_contradicts_a_default_names_the_site(site):
    path = site()
    with pytest.raises(ConfigError, match="both true") as caught:
        load({**MICRO, "fp16": True})
    assert f"bf16.enabled: from the site file {path}" in str(caught.value)
    site("[config]\nzero_optimization = {stge = 1}\n")
    with pytest.raises(ConfigError, match='did you mean "stage"') as caught:
        load(MICRO)
    assert f"from the site file {path}" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[config\n", "is no TOML"),
        ("[config]\na = " + "[" * 10_000, "is no TOML"),
        ("[settings]\n", "settings is nothing that it can say"),
        ('locked = "a"\n', "locked is nothing"),
        ("locked = [1]\n", "locked is a list"),
        ('locked = ["zero_optimisation.stage"]\n', "no such setting to lock"),
        ("[config]\ntrain_batch_size = 4\n", "batch sizes belong to runs"),
        ("[environment]\nA = 1\n", "A is no variable"),
        ('[environment]\nMPISPEED_SITE_FILE = "/x"\n', "is no variable"),
    ],
)
def test_mistakes_of_the_file_name_it(site, text, told):
    path = site(text)
    with pytest.raises(ConfigError) as caught:
        load(MICRO)
    assert told in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_file_that_others_may_write_is_refused(site, tmp_path):
    path = site()
    path.chmod(0o664)
    with pytest.raises(ConfigError, match="written by others than its owner; chmod go-w"):
        load(MICRO)
    path.chmod(0o644)
    tmp_path.chmod(0o777)
    with pytest.raises(ConfigError, match="replaced by others"):
        load(MICRO)
    tmp_path.chmod(0o1777)
    assert load(MICRO).config.bf16.enabled
    link = tmp_path / "link.toml"
    link.symlink_to(path)
    path.chmod(0o606)
    with pytest.raises(ConfigError, match="written by others"):
        read_site_file({VARIABLE: str(link)})


def test_a_link_that_others_may_put_elsewhere_is_refused(site, tmp_path):
    path, folder = site(), tmp_path / "folder"
    folder.mkdir()
    (folder / "link.toml").symlink_to(path)
    environ = {VARIABLE: str(folder / "link.toml")}
    assert read_site_file(environ).profile == "mpich"
    folder.chmod(0o777)
    with pytest.raises(ConfigError, match=f"replaced by others.*{folder}"):
        read_site_file(environ)


def test_all_links_of_a_chain_count(site, tmp_path):
    path, folder = site(), tmp_path / "folder"
    folder.mkdir()
    (folder / "second.toml").symlink_to(path)
    (tmp_path / "first.toml").symlink_to(folder / "second.toml")
    environ = {VARIABLE: str(tmp_path / "first.toml")}
    assert read_site_file(environ).profile == "mpich"
    folder.chmod(0o777)
    for read in (lambda: read_site_file(environ), lambda: read_site_file({}, tmp_path / "first.toml")):
        with pytest.raises(ConfigError, match=f"replaced by others.*{folder}"):
            read()
    folder.chmod(0o1777)  # only the owner of a link there can put it elsewhere
    assert read_site_file(environ).profile == "mpich"
    if os.geteuid() == 0:
        os.chown(folder / "second.toml", 4321, 4321, follow_symlinks=False)
        with pytest.raises(ConfigError, match=f"replaced by others.*{folder}"):
            read_site_file(environ)


def test_a_file_that_cannot_be_looked_at_is_one_message(tmp_path):
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(ConfigError, match=f"a cannot be read: .*; correct {VARIABLE}"):
        read_site_file({VARIABLE: str(tmp_path / "a")})
    system = tmp_path / ("n" * 300)  # as a folder that only root may enter: an error that is not "it is not there"
    with pytest.raises(ConfigError, match="cannot be read: File name too long; ask the administrators"):
        read_site_file({}, system)


def test_a_file_that_is_not_there(tmp_path):
    assert read_site_file({}, tmp_path / "none") is NONE
    with pytest.raises(
        ConfigError, match=f"cannot be read: No such file or directory; correct {VARIABLE}, or unset it"
    ):
        read_site_file({VARIABLE: str(tmp_path / "none")})
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(ConfigError, match="no ordinary file"):
        read_site_file({VARIABLE: str(tmp_path / "pipe")})


def test_the_file_of_the_machine_counts_where_nobody_names_another(site, tmp_path):
    path = site()
    assert read_site_file({}, path).profile == "mpich"
    other = tmp_path / "other.toml"
    other.write_text('profile = "gpu"\n')
    other.chmod(0o600)
    assert read_site_file({VARIABLE: str(other)}, path).profile == "gpu"  # of the same owner


def test_a_file_of_another_user_does_not_replace_that_of_the_machine(site, tmp_path, monkeypatch):
    path, other = site(), tmp_path / "other.toml"
    other.write_text("")
    other.chmod(0o600)
    if os.geteuid() == 0:
        folder = tmp_path / "of-user"
        folder.mkdir()
        other = other.rename(folder / "other.toml")
        os.chown(folder, 4321, 4321)
        os.chown(other, 4321, 4321)
        folder.chmod(0o700)
        with pytest.raises(ConfigError, match="of user 4321, but this machine has"):
            read_site_file({VARIABLE: str(other)}, path)
        assert read_site_file({VARIABLE: str(other)}, tmp_path / "none").owner == "user 4321"
    else:
        with pytest.raises(ConfigError, match="but this machine has"):
            read_site_file({VARIABLE: str(other)}, Path("/etc/passwd"))


def test_settings_of_inference_take_the_section_for_parameters_where_they_are_streamed(site):
    site()
    streamed = resolve({"zero": {"stage": 3, "stage3_prefetch_bucket_size": "auto"}}, {"zero": {"overlap_comm": True}})
    assert streamed.zero.prefetch_bucket_size == 1000
    assert streamed.zero.allgather_bucket_size == 4_000_000
    assert streamed.zero.stage == 3  # not that of training, though it is locked
    assert "zero" not in resolve().model_fields_set
    assert resolve({"zero": {"stage": 1}}).zero.model_fields_set == {"stage"}
    assert resolve({"zero": {"stage": 3, "allgather_bucket_size": 7}}).zero.allgather_bucket_size == 7


@pytest.mark.parametrize("stage", [0, 3])
def test_settings_of_inference_change_nothing_that_is_locked(site, stage):
    path = site()
    for given in (
        {"stage": stage, "stage3_prefetch_bucket_size": 7},
        ZeroOptimization(stage=stage, prefetch_bucket_size=7),
    ):
        for source in (resolve, lambda zero: resolve(None, zero), lambda zero: resolve(InferenceConfig(**zero))):
            with pytest.raises(ConfigError, match=rf"zero\.prefetch_bucket_size: is locked at 1000 by {path} of "):
                source({"zero": given})
    assert resolve({"zero": {"stage": stage, "stage3_prefetch_bucket_size": "1e3"}}).zero.prefetch_bucket_size == 1000


def test_a_section_of_inference_that_is_locked_as_a_whole(site):
    site('locked = ["zero_optimization"]\n[config.zero_optimization]\noffload_param = {device = "cpu"}\n')
    assert resolve({"zero": {"stage": 3}}).zero.offload_param.device == "cpu"
    zero = ZeroOptimization(stage=3, offload_param=OffloadParam(device="cpu"))
    assert resolve(InferenceConfig(zero=zero)).zero == zero
    with pytest.raises(ConfigError, match=r"zero\.offload_param\.device: is locked at \"cpu\""):
        resolve({"zero": {"stage": 3, "offload_param": {"device": "none"}}})
    with pytest.raises(ConfigError, match=r"zero\.overlap_comm: is locked by"):
        resolve({"zero": {"stage": 3, "overlap_comm": False}})


def test_mistakes_of_the_file_are_told_with_those_of_settings_of_inference(site):
    path = site("[config.zero_optimization]\nstge = 1\n")
    with pytest.raises(ConfigError, match=f"zero\\.stge.*from the site file {path}"):
        resolve({"zero": {"stage": 3}})
    site("[config]\ntrain_batch_size = 4\n")
    with pytest.raises(ConfigError, match="batch sizes belong to runs"):
        resolve()


def test_settings_that_are_made_of_others_have_no_site_file_again(site):
    site()
    hold(None)
    with set_aside():
        assert read_for_job() is current() is NONE
        hold(NONE)
        assert load({**MICRO, "zero_optimization": {"stage": 3}}).config.zero_optimization.stage == 3
    assert read_for_job() == current() != NONE


def test_what_rank_0_has_read_counts_from_then_on(site):
    path = site()
    first = pickle.loads(pickle.dumps(current()))
    hold(first)
    path.unlink()
    assert load(MICRO).config.zero_optimization.stage == 2
    hold(None)
    with pytest.raises(ConfigError, match="cannot be read"):
        load(MICRO)


def test_facts_hide_secrets():
    site = SiteFile("/x", "root", {"wandb": {"api_key": "abc"}}, (), {"WANDB_API_KEY": "abc", "A": "1"})
    facts = json.loads(json.dumps(site.as_facts()))
    assert "abc" not in json.dumps(facts)
    assert facts["environment"]["A"] == "1"
    assert NONE.as_facts() == {}
    assert site.missing_from({"A": "2"}) == {"WANDB_API_KEY": "abc"}
    assert site_file.current({}) is NONE or site_file.SYSTEM_FILE.exists()

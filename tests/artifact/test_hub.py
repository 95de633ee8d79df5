"""Artifacts on the Hugging Face Hub: the real client against a Hub on 127.0.0.1."""

import os
import subprocess
import sys

import pytest
import torch
import transformers
from conftest import CHAT, DOCUMENTS, QUERY, random_projection, tiny_config
from hub_server import READER, WRITER, HubServer, connected, files_of
from huggingface_hub import constants

from rsrank_rag import RSRank, RSRankError
from rsrank_rag.artifact import hub as artifact_hub
from rsrank_rag.backends.options import LoadOptions
from rsrank_rag.errors import ArtifactError, BackboneError

REPO, MODEL = "harbour/ranker", "harbour/tiny-qwen"


@pytest.fixture
def hub(tmp_path):
    """A Hub with nothing on it, which this process's client is connected to."""
    with HubServer() as server, connected(server, tmp_path / "home"):
        yield server


@pytest.fixture
def load(tmp_path):
    """`RSRank.from_pretrained` with a Hub cache of the test's own."""

    def call(name=REPO, **options):
        return RSRank.from_pretrained(
            name,
            **{"device": "cpu", "dtype": "float32", "cache_dir": tmp_path / "cache", **options},
        )

    return call


@pytest.fixture(scope="module")
def artifact(ranker, tmp_path_factory):
    """Function: seed of B -> an artifact's files and its scores. The backbone is a local folder."""

    def make(seed=1):
        variant = RSRank(
            ranker.backbone, ranker.prompts, random_projection("qwen3", seed=seed), ranker.config
        )
        folder = tmp_path_factory.mktemp("artifact")
        variant.save_pretrained(folder)
        return files_of(folder), variant.score(QUERY, DOCUMENTS)

    return make


@pytest.fixture
def model(hub, tiny_folder):
    """A language model on the Hub; gives its commit."""
    return hub.commit(MODEL, files_of(tiny_folder("qwen3")))


@pytest.fixture
def from_hub(model, tmp_path):
    """Function: revision -> a ranker whose backbone lies on the Hub."""

    def make(revision=model):
        options = LoadOptions(device="cpu", dtype="float32", cache_dir=tmp_path / "maker")
        return RSRank.from_backbone(
            MODEL, random_projection("qwen3"), template=CHAT, revision=revision, options=options
        )

    return make


def refusal(action, *arguments, kind=ArtifactError, **options):
    """The message of the one error that an action ends with."""
    with pytest.raises(RSRankError) as caught:
        action(*arguments, **options)
    assert type(caught.value) is kind
    return str(caught.value)


def save(ranker, folder):
    ranker.save_pretrained(folder)
    return files_of(folder)


# Downloading


def test_an_artifact_is_loaded_by_its_hub_id(hub, load, artifact):
    files, scores = artifact()
    hub.commit(REPO, files)
    assert load().score(QUERY, DOCUMENTS) == scores


def test_artifact_and_backbone_both_come_from_the_hub(hub, load, from_hub, tmp_path):
    made = from_hub()
    hub.commit(REPO, save(made, tmp_path / "made"))
    loaded = load()
    assert loaded.config.backbone.name == MODEL
    assert loaded.score(QUERY, DOCUMENTS) == made.score(QUERY, DOCUMENTS)
    assert (tmp_path / "cache" / "models--harbour--tiny-qwen").is_dir()


def test_a_built_in_artifact_without_hashes_takes_its_backbone_from_the_hub(
    hub, load, from_hub, tmp_path, monkeypatch
):
    made = from_hub(None)
    spec = made.config.backbone.model_copy(update={"bits": 4, "files": {}})
    made.config = made.config.model_copy(update={"backbone": spec})
    made.save_pretrained(tmp_path / "models" / "tiny-qwen")
    monkeypatch.setattr(artifact_hub, "BUILTIN", tmp_path / "models")
    loaded = load("tiny-qwen")
    assert loaded.score(QUERY, DOCUMENTS) == made.score(QUERY, DOCUMENTS)
    # The prefix cache tells apart what the artifact does not.
    assert "model.safetensors" in loaded.backbone.identity["files"]


def other_model(folder):
    """The tiny model's files with other weights."""
    torch.manual_seed(7)
    transformers.AutoModel.from_config(tiny_config("qwen3")).save_pretrained(folder)
    return files_of(folder)


def test_the_backbone_keeps_the_revision_that_the_artifact_pins(
    hub, load, from_hub, tiny_folder, tmp_path
):
    made = from_hub()
    hub.commit(REPO, save(made, tmp_path / "made"))
    hub.commit(MODEL, files_of(tiny_folder("qwen3")) | other_model(tmp_path / "other"))
    assert load().score(QUERY, DOCUMENTS) == made.score(QUERY, DOCUMENTS)


def test_a_backbone_that_is_not_pinned_and_moved_on_is_refused(
    hub, load, from_hub, tiny_folder, tmp_path
):
    hub.commit(REPO, save(from_hub(None), tmp_path / "made"))
    load()
    hub.commit(MODEL, files_of(tiny_folder("qwen3")) | other_model(tmp_path / "other"))
    message = refusal(load)
    assert f"weights of {MODEL} are not those of {MODEL} (revision not pinned)" in message


def test_a_model_that_is_damaged_in_the_cache_is_refused_with_the_files_name(
    hub, load, from_hub, tmp_path
):
    hub.commit(REPO, save(from_hub(), tmp_path / "made"))
    load()
    [weights] = (tmp_path / "cache" / "models--harbour--tiny-qwen").glob(
        "snapshots/*/model.safetensors"
    )
    content = bytearray(weights.read_bytes())
    content[-4:] = bytes(4)
    weights.resolve().write_bytes(content)
    assert "model.safetensors changed since this artifact was made" in refusal(load)


def test_the_artifacts_revision_is_not_asked_of_the_backbone(hub, load, from_hub, tmp_path):
    made = from_hub()
    hub.commit(REPO, save(made, tmp_path / "made"), branch="trial")
    assert load(revision="trial").score(QUERY, DOCUMENTS) == made.score(QUERY, DOCUMENTS)


def test_a_backbone_inside_the_artifact_comes_with_it(hub, load, ranker, tmp_path):
    ranker.save_pretrained(tmp_path / "made", include_backbone=True)
    hub.commit(REPO, files_of(tmp_path / "made"))
    assert load().score(QUERY, DOCUMENTS) == ranker.score(QUERY, DOCUMENTS)


def test_a_revision_is_a_commit_a_branch_or_a_tag(hub, load, artifact):
    (old, old_scores), (new, new_scores) = artifact(1), artifact(2)
    assert old_scores != new_scores
    first = hub.commit(REPO, old)
    second = hub.commit(REPO, new)
    hub.tag(REPO, "v1.0", first)
    hub.commit(REPO, old, branch="fix/one")
    expected = {None: new, first: old, second: new, "main": new, "v1.0": old, "fix/one": old}
    for revision, files in expected.items():
        assert load(revision=revision).score(QUERY, DOCUMENTS) == (
            old_scores if files is old else new_scores
        )


def test_a_branch_is_followed_when_it_moves_on(hub, load, artifact):
    (old, old_scores), (new, new_scores) = artifact(1), artifact(2)
    hub.commit(REPO, old)
    assert load().score(QUERY, DOCUMENTS) == old_scores
    hub.commit(REPO, new)
    assert load().score(QUERY, DOCUMENTS) == new_scores


@pytest.mark.parametrize("revision", ["v9", "0123456789abcdef0123456789abcdef01234567"])
def test_an_unknown_revision_is_told_from_an_unknown_repository(revision, hub, load, artifact):
    hub.commit(REPO, artifact()[0])
    message = refusal(load, revision=revision)
    assert f"{REPO!r} (revision {revision})" in message
    assert "RevisionNotFoundError" in message


def test_an_unknown_repository_is_named_with_what_to_do(hub, load):
    message = refusal(load, "nobody/nothing")
    assert "'nobody/nothing' is neither built in" in message
    assert "log in ('hf auth login')" in message


def test_a_name_without_owner_that_nobody_has_is_an_unknown_repository(hub, load):
    assert "'nonsense-name' is neither built in" in refusal(load, "nonsense-name")


@pytest.mark.parametrize(
    "name", ["not a valid//id", "a/b/c", "owner/", "../up", "-x", "a--b/c", "x" * 200, "a\nb"]
)
def test_what_cannot_be_a_hub_id_is_refused_without_asking_the_hub(name, hub, load):
    message = refusal(load, name)
    assert repr(name) in message
    assert "Check the name (owner/name)" in message
    assert hub.log == []


def test_the_repository_of_a_language_model_is_refused_before_its_weights_are_fetched(
    hub, model, load
):
    assert "Is this the folder of a language model" in refusal(load, MODEL)
    assert hub.downloads("config.json") == 1
    assert hub.downloads("model.safetensors") == 0


def test_private_repositories_need_a_token(hub, load, from_hub, tmp_path):
    made = from_hub()
    hub.commit(REPO, save(made, tmp_path / "made"), private=True)
    hub.repositories[REPO].private = hub.repositories[MODEL].private = True
    for token in (None, "hf_expired"):
        assert "If it is private, log in" in refusal(load, token=token)
    assert load(token=READER).score(QUERY, DOCUMENTS) == made.score(QUERY, DOCUMENTS)


def test_a_private_backbone_is_named_when_only_the_artifact_may_be_read(
    hub, load, from_hub, tmp_path
):
    hub.commit(REPO, save(from_hub(), tmp_path / "made"))
    hub.repositories[MODEL].private = True
    assert repr(MODEL) in refusal(load, kind=BackboneError)


# The cache


def test_what_was_loaded_once_needs_no_hub_any_more(hub, load, from_hub, tmp_path):
    hub.commit(REPO, save(from_hub(), tmp_path / "made"))
    scores = load().score(QUERY, DOCUMENTS)
    hub.stop()
    assert load(local_files_only=True).score(QUERY, DOCUMENTS) == scores


def test_local_files_only_asks_nobody(hub, load, from_hub, tmp_path):
    hub.commit(REPO, save(from_hub(), tmp_path / "made"))
    load()
    hub.log.clear()
    load(local_files_only=True)
    message = refusal(load, "nobody/nothing", local_files_only=True)
    assert "LocalEntryNotFoundError" in message
    assert "pass the path of a local copy" in message
    assert hub.log == []


def test_offline_mode_is_named_as_the_cache(hub, load, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "LocalEntryNotFoundError" in refusal(load)


def test_a_hub_that_is_down_is_replaced_by_the_cache(hub, load, artifact):
    files, scores = artifact()
    hub.commit(REPO, files)
    load()
    hub.stop()
    assert load().score(QUERY, DOCUMENTS) == scores


def test_a_second_load_fetches_no_file_again(hub, load, artifact):
    hub.commit(REPO, artifact()[0])
    load()
    load()
    assert [hub.downloads(name) for name in ("config.json", "projection.safetensors")] == [1, 1]


def test_a_revision_that_was_not_downloaded_is_not_in_the_cache(hub, load, artifact):
    hub.commit(REPO, artifact()[0])
    load()
    message = refusal(load, revision="v2", local_files_only=True)
    assert f"{REPO!r} (revision v2)" in message
    assert "LocalEntryNotFoundError" in message


# Mishaps


def test_a_hub_that_is_down_is_an_error_when_nothing_is_cached(hub, load):
    hub.stop()
    message = refusal(load)
    assert f"{REPO!r} is neither built in" in message
    assert "could not be downloaded" in message


def test_a_hub_in_trouble_is_an_error(hub, load):
    hub.status["/api/models/"] = 500
    message = refusal(load)
    assert "could not be downloaded" in message
    assert "bad day" in message


def test_a_login_page_instead_of_the_hub_is_an_error(hub, load):
    hub.pages["/"] = (
        b"<html><body>Welcome to the harbour guest network. Please log in.</body></html>"
    )
    message = refusal(load)
    assert repr(REPO) in message
    assert "could not be downloaded" in message


def test_a_projection_that_was_uploaded_damaged_is_an_error(hub, load, artifact):
    files = artifact()[0]
    hub.commit(REPO, files | {"projection.safetensors": files["projection.safetensors"][:-100]})
    message = refusal(load)
    assert "projection.safetensors is missing or damaged" in message
    assert "Download the artifact again" in message


def test_a_repository_without_projection_is_an_error(hub, load, artifact):
    files = artifact()[0]
    del files["projection.safetensors"]
    hub.commit(REPO, files)
    assert "projection.safetensors is missing or damaged" in refusal(load)


def test_a_download_that_breaks_off_goes_on_where_it_stopped(hub, load, artifact, monkeypatch):
    files, scores = artifact()
    hub.commit(REPO, files)
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 100)
    hub.cut["projection.safetensors"] = [1000]
    assert load().score(QUERY, DOCUMENTS) == scores
    assert hub.cut["projection.safetensors"] == []
    assert ("projection.safetensors", "bytes=1000-") in hub.ranges


def test_a_download_that_always_breaks_off_is_an_error_and_leaves_no_damage(
    hub, load, artifact, monkeypatch
):
    files, scores = artifact()
    hub.commit(REPO, files)
    hub.cut["projection.safetensors"] = [0] * 100
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda _seconds: None)
    message = refusal(load)
    assert "could not be downloaded" in message
    hub.cut.clear()
    assert load().score(QUERY, DOCUMENTS) == scores


def test_a_download_that_is_too_short_is_an_error_and_leaves_no_damage(hub, load, artifact):
    files, scores = artifact()
    hub.commit(REPO, files)
    hub.shorten["projection.safetensors"] = 100
    assert "could not be downloaded" in refusal(load)
    hub.shorten.clear()
    assert load().score(QUERY, DOCUMENTS) == scores


def test_a_backbone_whose_download_always_breaks_off_is_an_error(
    hub, load, from_hub, tmp_path, monkeypatch
):
    hub.commit(REPO, save(from_hub(), tmp_path / "made"))
    hub.cut["model.safetensors"] = [0] * 100
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda _seconds: None)
    message = refusal(load, kind=BackboneError)
    assert repr(MODEL) in message
    hub.cut.clear()
    load()


def test_a_backbone_revision_that_is_gone_is_named(hub, load, from_hub, model, tmp_path):
    hub.commit(REPO, save(from_hub(), tmp_path / "made"))
    del hub.repositories[MODEL].commits[model]
    message = refusal(load, kind=BackboneError)
    assert repr(MODEL) in message
    assert model in message


# Uploading


@pytest.mark.parametrize("xet", [False, True], ids=["lfs", "xet client"])
def test_what_is_pushed_loads_to_the_same_scores(xet, hub, load, from_hub, monkeypatch):
    # Xet is the client's other upload path. Without a Xet store, only files in git can be fetched.
    if xet:
        pytest.importorskip("hf_xet")
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", False)
        hub.lfs_suffixes = ()
    made = from_hub()
    address = made.push_to_hub(REPO, token=WRITER, commit_message="First B")
    head = hub.repositories[REPO].refs["main"]
    assert address == f"{hub.url}/{REPO}/commit/{head}"
    assert hub.repositories[REPO].messages[head] == "First B"
    assert not hub.repositories[REPO].private
    assert set(hub.repositories[REPO].commits[head]) == {
        ".gitattributes",
        "README.md",
        "config.json",
        "projection.safetensors",
    }
    assert len(hub.large) == (0 if xet else 1)
    assert load().score(QUERY, DOCUMENTS) == made.score(QUERY, DOCUMENTS)


def test_a_model_that_only_this_machine_has_is_not_pushed_by_name(hub, load, ranker):
    message = refusal(ranker.push_to_hub, REPO, token=WRITER)
    assert ranker.config.backbone.name in message
    assert "include_backbone=True" in message
    assert REPO not in hub.repositories
    ranker.push_to_hub(REPO, include_backbone=True, token=WRITER)
    assert load().score(QUERY, DOCUMENTS) == ranker.score(QUERY, DOCUMENTS)


def test_a_new_repository_can_be_private(hub, load, from_hub):
    made = from_hub()
    made.push_to_hub(REPO, token=WRITER, private=True)
    assert hub.repositories[REPO].private
    assert "it is private" in refusal(load)
    assert load(token=READER).score(QUERY, DOCUMENTS) == made.score(QUERY, DOCUMENTS)


def test_pushing_to_a_branch_makes_it_and_leaves_main_alone(hub, load, ranker, artifact):
    other, other_scores = artifact(2)
    main = hub.commit(REPO, other)
    ranker.push_to_hub(REPO, include_backbone=True, token=WRITER, revision="trial/one")
    assert hub.repositories[REPO].refs["main"] == main
    assert load().score(QUERY, DOCUMENTS) == other_scores
    assert load(revision="trial/one").score(QUERY, DOCUMENTS) == ranker.score(QUERY, DOCUMENTS)


def test_pushing_again_adds_a_commit_and_pushing_the_same_again_adds_none(
    hub, load, ranker, artifact
):
    hub.commit(REPO, artifact(2)[0])
    first = ranker.push_to_hub(REPO, include_backbone=True, token=WRITER, revision="main")
    assert len(hub.repositories[REPO].commits) == 2
    assert ranker.push_to_hub(REPO, include_backbone=True, token=WRITER) == first
    assert len(hub.repositories[REPO].commits) == 2
    assert load().score(QUERY, DOCUMENTS) == ranker.score(QUERY, DOCUMENTS)


def test_an_artifact_with_its_own_backbone_is_pushed_with_it(hub, load, ranker, tmp_path):
    ranker.save_pretrained(tmp_path / "made", include_backbone=True)
    RSRank.from_pretrained(tmp_path / "made", device="cpu", dtype="float32").push_to_hub(
        REPO, token=WRITER
    )
    assert (
        "backbone/model.safetensors"
        in hub.repositories[REPO].commits[hub.repositories[REPO].refs["main"]]
    )
    assert load().score(QUERY, DOCUMENTS) == ranker.score(QUERY, DOCUMENTS)


def test_the_token_of_the_environment_is_used(hub, ranker, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", WRITER)
    ranker.push_to_hub(REPO, include_backbone=True)
    assert REPO in hub.repositories


@pytest.mark.parametrize("token", [None, False, READER, "hf_expired"])
def test_pushing_without_permission_is_an_error_and_makes_nothing(token, hub, ranker):
    message = refusal(ranker.push_to_hub, REPO, include_backbone=True, token=token)
    assert f"Pushing to {REPO!r} failed" in message
    assert "hf auth login" in message
    assert hub.repositories == {}


@pytest.mark.parametrize("name", ["not a valid//id", "a/b/c"])
def test_pushing_to_what_cannot_be_a_hub_id_is_an_error(name, hub, ranker):
    message = refusal(ranker.push_to_hub, name, include_backbone=True, token=WRITER)
    assert f"Pushing to {name!r} failed" in message
    assert "Check the name (owner/name)" in message
    assert hub.repositories == {}


def test_pushing_to_a_hub_that_is_down_is_an_error(hub, ranker):
    hub.stop()
    message = refusal(ranker.push_to_hub, REPO, include_backbone=True, token=WRITER)
    assert f"Pushing to {REPO!r} failed: ConnectError" in message


@pytest.mark.parametrize("step", ["/api/validate-yaml", f"/api/models/{REPO}/commit", "/lfs/"])
def test_an_upload_that_the_hub_refuses_half_way_is_an_error_with_its_reason(step, hub, ranker):
    hub.status[step] = 403
    message = refusal(ranker.push_to_hub, REPO, include_backbone=True, token=WRITER)
    assert f"Pushing to {REPO!r} failed" in message
    assert "bad day" in message
    assert len(hub.repositories[REPO].commits) == 1


# A process of its own

SCRIPT = """
import sys

from rsrank_rag import RSRank

name, documents = sys.argv[1], sys.argv[2:]
ranker = RSRank.from_pretrained(name, device="cpu", dtype="float32")
print([score.hex() for score in ranker.score(documents.pop(), documents)])
"""


@pytest.mark.slow
def test_a_fresh_process_finds_the_hub_and_its_cache_by_the_environment(hub, from_hub, tmp_path):
    """The only test in which the client reads its settings itself, as it does for users."""
    made = from_hub()
    hub.commit(REPO, save(made, tmp_path / "made"))
    foreign = ("HF_", "HUGGING", "TRANSFORMERS_")
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(foreign)
    }
    environment |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "fresh")}
    actual = subprocess.run(
        [sys.executable, "-c", SCRIPT, REPO, *DOCUMENTS, QUERY],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert actual.returncode == 0, actual.stderr
    assert actual.stdout.strip() == str([score.hex() for score in made.score(QUERY, DOCUMENTS)])
    assert (tmp_path / "fresh" / "hub" / "models--harbour--ranker").is_dir()


# The card


def test_the_card_names_the_repository_that_it_was_pushed_to(hub, ranker):
    refusal(ranker.push_to_hub, "wrong/name", include_backbone=True, token=READER)
    ranker.push_to_hub(REPO, include_backbone=True, token=WRITER)
    pushed = hub.repositories[REPO]
    card = pushed.commits[pushed.refs["main"]]["README.md"].decode()
    assert f'from_pretrained("{REPO}")' in card
    assert "wrong/name" not in card
    assert "PATH_OR_HUB_ID" not in card

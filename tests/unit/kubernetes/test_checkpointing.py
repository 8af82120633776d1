"""The settings of a TrainJob: what people write, what is refused, and the normalised form."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reprieve.errors import ConfigError
from reprieve.kubernetes.checkpointing import ACCESS_MODES, SAVE_TYPES, STRATEGIES, from_yaml, parse
from reprieve.kubernetes.storage import ClaimMount
from tests.support.train_jobs import STORAGE

CLAIM = {"claimName": "shared"}
BESIDE = {"persistentVolume": CLAIM}


def parsed(**fields: Any) -> Any:
    return parse({"storage": STORAGE, **fields}, "spec.checkpointing")


def test_a_folder_in_a_claim_with_all_defaults() -> None:
    found = parsed()
    assert found.uri == found.folder == "/workspace/checkpoints"
    assert found.volume == ClaimMount(claim="shared", path="/workspace")
    assert (found.enabled, found.interval, found.max_checkpoints, found.resume) == (True, "5m", 3, True)


@pytest.mark.parametrize(
    ("storage", "uri", "volume"),
    [
        ({"persistentVolume": CLAIM}, "/mnt/kubeflow-checkpoints/checkpoints", "/mnt/kubeflow-checkpoints"),
        ({"uri": "pvc://shared/runs/a"}, "/mnt/kubeflow-checkpoints/runs/a", "/mnt/kubeflow-checkpoints"),
        ({"uri": "pvc://shared"}, "/mnt/kubeflow-checkpoints/checkpoints", "/mnt/kubeflow-checkpoints"),
        ({"uri": "pvc://shared/a", "persistentVolume": {**CLAIM, "mountPath": "/w/"}}, "/w/a", "/w"),
        ({"uri": "file:///w/a", "persistentVolume": {**CLAIM, "mountPath": "/w"}}, "/w/a", "/w"),
        ({"uri": "/w//a/", "persistentVolume": {**CLAIM, "mountPath": "/w"}}, "/w/a", "/w"),
        ({"uri": "/anywhere"}, "/anywhere", None),
    ],
)
def test_ways_to_write_the_storage(storage: dict[str, Any], uri: str, volume: str | None) -> None:
    found = parsed(storage=storage)
    assert (found.uri, found.volume and found.volume.path) == (uri, volume)


def test_a_claim_beside_the_storage_is_the_same_as_one_in_it() -> None:
    beside = parsed(storage={"uri": STORAGE["uri"]}, persistentVolume=STORAGE["persistentVolume"])
    assert beside == parsed()
    assert parsed(persistentVolume=STORAGE["persistentVolume"]) == parsed(), "in both places"


@pytest.mark.parametrize("inside", [True, False])
def test_an_object_store_falls_back_to_the_claim(inside: bool) -> None:
    uri = {"uri": "s3://bucket/team/run", "secretRef": {"name": "keys"}}
    found = (
        parsed(storage={**uri, "persistentVolume": CLAIM}) if inside else parsed(storage=uri, persistentVolume=CLAIM)
    )
    assert (found.uri, found.folder) == ("s3://bucket/team/run", "/mnt/kubeflow-checkpoints/team/run")
    assert found.secret == "keys"


BAD = [
    ({"interval": "5 minutes"}, "interval: '5 minutes' is not understood: write 5m, 90s or 1h30m"),
    ({"interval": "0"}, "interval: '0' is not understood"),
    ({"interval": "0s"}, "interval: '0s' is not understood"),
    ({"interval": ""}, "interval: '' is not understood"),
    ({"strategy": "steps", "interval": "5m"}, 'strategy: steps counts steps: write interval: "500"'),
    ({"strategy": "daily"}, "strategy: 'daily': write steps, epoch or time"),
    ({"maxCheckpoints": 0}, "maxCheckpoints: keep at least 1; enabled: false turns checkpoints off"),
    ({"maxCheckpoints": "3"}, "maxCheckpoints: it is a text: write a whole number"),
    ({"enabled": "yes"}, "enabled: it is a text: write true or false"),
    ({"storage": None}, "storage: there is none: write storage.uri, or"),
    (
        {"storage": {"uri": "nfs://host/x"}},
        "storage.uri: nfs:// is not known: write a folder, pvc://CLAIM/FOLDER or s3://",
    ),
    ({"storage": {"uri": "s3://bucket/x"}}, "storage.uri: this version does not write to s3:// yet: name a claim in"),
    ({"storage": {"uri": "checkpoints"}}, "storage.uri: checkpoints is not an absolute path without .."),
    ({"storage": {"uri": "/w/../etc"}}, "storage.uri: /w/../etc is not an absolute path without .."),
    ({"storage": {"uri": "/"}}, "storage.uri: / is no folder for checkpoints: write /workspace/checkpoints"),
    ({"storage": {"uri": "/."}}, "storage.uri: / is no folder"),
    ({"storage": {"uri": "/w\0x"}}, "storage.uri: it has a control character"),
    ({"storage": {"uri": "/w\nx"}}, "storage.uri: it has a control character"),
    ({"storage": {"persistentVolume": {**CLAIM, "mountPath": "/w\n"}}}, "mountPath: it has a control character"),
    ({"storage": {"persistentVolume": {**CLAIM, "subPath": "a\nb"}}}, "subPath: it has a control character"),
    (
        {"storage": {"uri": "s3://b/../../etc"}, **BESIDE},
        "s3://b/../../etc is not a URI without ..: write s3://b/FOLDER",
    ),
    ({"storage": {"uri": "pvc://shared/../x"}}, "pvc://shared/../x is not a URI without .."),
    ({"storage": {"uri": "s3:///x"}, **BESIDE}, "s3:///x names no bucket: write s3://BUCKET/PREFIX"),
    ({"storage": {"uri": "s3://Bucket/x"}, **BESIDE}, "s3://Bucket/x names no bucket"),
    ({"storage": {"uri": "s3://key:secret@b/x"}, **BESIDE}, "storage.uri: it has credentials: write it without them"),
    ({"storage": {"uri": "s3://b/x\n"}, **BESIDE, "interval": "x"}, "interval: 'x' is not understood"),
    ({"storage": {"uri": "pvc:///x"}}, "storage.uri: pvc:///x names no claim: write pvc://CLAIM/FOLDER"),
    (
        {"storage": {"uri": "/elsewhere", "persistentVolume": {**CLAIM, "mountPath": "/workspace"}}},
        "/elsewhere is not in the volume, which is mounted at /workspace: write /workspace/elsewhere",
    ),
    (
        {"storage": {"uri": "/workspace2", "persistentVolume": {**CLAIM, "mountPath": "/workspace"}}},
        "is not in the volume",
    ),
    (
        {"storage": {"uri": "pvc://a/x", "persistentVolume": CLAIM}},
        "pvc://a/x and persistentVolume.claimName shared disagree",
    ),
    ({"storage": {"persistentVolume": {"mountPath": "/w"}}}, "storage.persistentVolume.claimName: there is none"),
    ({"storage": {"persistentVolume": {**CLAIM, "subPath": "../x"}}}, "subPath: ../x leaves the volume"),
    ({"storage": {"persistentVolume": {**CLAIM, "mountPath": "/"}}}, "mountPath: / would hide the image"),
    ({"storage": {**STORAGE, "accessMode": "ReadOnlyMany"}}, "accessMode: 'ReadOnlyMany': write ReadWriteOnce"),
    ({"persistentVolume": {"claimName": "other"}}, "persistentVolume: storage.persistentVolume names another"),
    ({"gracePeriod": "soon"}, "gracePeriod: 'soon' is not a duration: write it like 30s or 2m"),
    ({"gracePeriod": "0s"}, "gracePeriod: '0s' is not a duration"),
    ({"gracePeriod": "10s", "killWait": "10s"}, "killWait: it leaves nothing of the grace period"),
    ({"saveType": "diff"}, "saveType: 'diff': write full or incremental"),
    ({"env": [{"value": "1"}]}, "env[0].name: it is not the name of a variable: write NAME"),
    ({"env": [{"name": "A"}, {"name": "A"}]}, "env[1].name: A is there twice"),
    ({"env": {"A": "1"}}, "env: write a list of variables"),
    ({"intervall": "5m"}, "intervall: there is no such field: did you mean interval?"),
    ({"version": 2}, "version: 2 is newer than this version of Reprieve reads (1)"),
]


@pytest.mark.parametrize(("fields", "message"), BAD, ids=[str(fields) for fields, _ in BAD])
def test_bad_settings_name_the_field_and_the_fix(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parsed(**fields)
    assert str(caught.value).startswith("spec.checkpointing")
    assert message in str(caught.value)


def test_disabled_needs_no_storage() -> None:
    assert not parse({"enabled": False}, "spec.checkpointing").enabled


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nstorage: {uri: /x", "is not YAML: while parsing a flow mapping: expected ',' or '}', but got '<stream"),
        ("a: 1\nstorage: {uri: /x", "in line 2, column 18"),
        ("a: !!int x", "is not YAML: a value of it cannot be read"),
        ("- 1", "has no fields"),
        ("a: &a [1]\nb: [*a, *a]", "is not YAML: aliases (*name) are not read"),
        ("!!python/object/apply:os.system ['true']", "is not YAML"),
        ("x: " + "y" * 100_000, "100003 characters; at most 65536 are read"),
    ],
)
def test_an_annotation_that_is_no_settings(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match="annotation") as caught:
        from_yaml(text, "annotation reprieve.dev/checkpointing")
    assert message in str(caught.value)


_WORD = st.from_regex(r"[a-z][a-z0-9]{0,8}", fullmatch=True)
_PATH = st.lists(_WORD, min_size=1, max_size=3).map(lambda words: "/" + "/".join(words))
_TEXT = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=20)


@st.composite
def written_settings(draw: st.DrawFn) -> dict[str, Any]:
    """Settings as people write them: all of these are valid."""
    mount = draw(_PATH)
    claim: dict[str, Any] = {"claimName": draw(_WORD)} | draw(st.sampled_from([{}, {"mountPath": mount}]))
    where = claim.get("mountPath", "/mnt/kubeflow-checkpoints")
    folder = where + draw(st.sampled_from(["", "/", *["/" + word for word in ("a", "b/c")]]))
    storage, beside = draw(
        st.sampled_from(
            [
                ({"persistentVolume": claim}, None),
                ({"uri": folder, "persistentVolume": claim}, None),
                ({"uri": folder}, claim),
                ({"uri": f"pvc://{claim['claimName']}{mount}"}, None),
                ({"uri": f"s3://bucket{mount}", "secretRef": {"name": draw(_WORD)}}, claim),
                ({"uri": mount}, None),
            ]
        )
    )
    strategy = draw(st.sampled_from([None, *STRATEGIES]))
    found: dict[str, Any] = {
        "storage": storage | draw(st.sampled_from([{}, *({"accessMode": mode} for mode in ACCESS_MODES)])),
        "persistentVolume": beside,
        "strategy": strategy,
        "interval": "500"
        if strategy == "steps"
        else draw(st.sampled_from([None, "5m", "1h30m", "90s", "auto", "never"])),
        "maxCheckpoints": draw(st.sampled_from([None, 1, 7])),
        "resumeFromCheckpoint": draw(st.sampled_from([None, True, False])),
        "saveType": draw(st.sampled_from([None, *SAVE_TYPES])),
        "gracePeriod": draw(st.sampled_from([None, "90s", "2m", "1500ms", "60"])),
        "killWait": draw(st.sampled_from([None, "1s", "0s"])),
        "env": [
            {"name": f"V{number}", "value": value} for number, value in enumerate(draw(st.lists(_TEXT, max_size=3)))
        ],
    }
    return {name: value for name, value in found.items() if value is not None}


@given(written_settings())
@settings(max_examples=200, deadline=None)
def test_the_normalised_form_means_the_same_and_is_its_own_normalised_form(written: dict[str, Any]) -> None:
    found = parse(written, "spec.checkpointing")
    again = from_yaml(found.to_yaml(), "annotation")
    assert again == found
    assert again.to_yaml() == found.to_yaml()

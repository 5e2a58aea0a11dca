import pytest
from hypothesis import given
from hypothesis import strategies as st

from geomon.record import tags

WORDS = st.from_regex(r"[a-z][a-z_]{0,12}", fullmatch=True)


@given(metric=WORDS, layer=st.integers(0, 300), head=st.integers(0, 200))
def test_what_is_built_is_taken_apart_again(metric, layer, head):
    assert tags.parse(tags.layer_tag(metric, layer)) == (metric, layer, None, "", "")
    tag = tags.layer_tag(metric, layer, tags.head_part(head))
    assert tags.parse(tag) == (metric, layer, head, "", "")
    assert tags.parse(tags.mean_tag(metric, "std")) == (metric, None, None, "std", "")


@pytest.mark.parametrize("name", ["loss", "mean", "reward_mean", "encoder_layer_03", "val/mean"])
def test_what_a_training_logs_is_of_no_metric_and_no_stack(name):
    tag = tags.training_tag(name)
    assert tags.parse(tag) is None
    assert tags.is_of_run(tag)
    assert tags.is_charted(tag)
    assert tags.out_of_stack(tag, {"encoder", "reward"}) == ("", tag)
    assert tags.layout([tag], {}) == {"by layer": {}}


@pytest.mark.parametrize("tag", ["geomon/seconds", "loss", "a/b/c", "a/layer_x", ""])
def test_other_names_are_no_tags_of_metrics(tag):
    assert tags.parse(tag) is None


def test_layers_sort_by_depth_as_text():
    names = [tags.layer_tag("twonn", layer) for layer in (0, 2, 10, 33)]
    assert names == sorted(names)


def test_heads_and_trust_of_single_layers_are_not_charted():
    assert not tags.is_charted("qk_cosine/layer_02/head_0")
    assert not tags.is_charted("twonn/layer_02/n")
    for tag in ("qk_cosine/layer_02/min", "twonn/mean/n", "gride/layer_02/k8", "geomon/overhead"):
        assert tags.is_charted(tag)


@given(places=st.sets(st.tuples(st.integers(0, 120), st.integers(0, 120)), max_size=12))
def test_heads_stand_by_layer_and_head_and_nothing_else_is_one(places):
    built = {
        place: tags.layer_tag("q_cosine", place[0], tags.head_part(place[1])) for place in places
    }
    others = [
        "q_cosine/layer_01", "q_cosine/mean", "q_cosine/layer_01/std", "q_cosine/layer_01/head_x",
        "q_cosine/encoder_layer_01/head_0", "cosine/layer_01/head_0", "q_cosine_2/layer_01/head_0",
        "training/layer_01/head_0",
    ]  # fmt: skip
    found = tags.heads_of([*reversed(built.values()), *others], "q_cosine")
    assert list(found.items()) == sorted(built.items())
    assert not tags.heads_of(["training/layer_01/head_0"], "training")

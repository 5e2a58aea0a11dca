import pytest

from geomon.record import tags


def test_layers_sort_by_depth_as_text():
    names = [tags.layer_tag("twonn", layer) for layer in (0, 2, 10, 33)]
    assert names == sorted(names)


@pytest.mark.parametrize("name", ["", "/loss", "loss/", "a//b", "a\nb", " loss", 3])
def test_what_a_training_logs_has_a_name_that_can_be_part_of_a_tag(name):
    with pytest.raises(ValueError, match="cannot name a value"):
        tags.training_tag(name)

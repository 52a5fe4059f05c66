"""Sizes from upstream's config.json: what is taken, what is left out, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from everyframe.core.errors import CheckpointError
from everyframe.families.opensora.config import STDiT3Config, STDiTConfig

HUB: dict[str, Any] = {
    "_name_or_path": "hpcai-tech/OpenSora-STDiT-v3",
    "architectures": ["STDiT3"],
    "caption_channels": 4096,
    "class_dropout_prob": 0.1,
    "depth": 28,
    "drop_path": 0.0,
    "enable_flash_attn": True,
    "enable_layernorm_kernel": True,
    "enable_sequence_parallelism": False,
    "freeze_y_embedder": True,
    "hidden_size": 1152,
    "in_channels": 4,
    "input_size": [None, None, None],
    "input_sq_size": 512,
    "mlp_ratio": 4.0,
    "model_max_length": 300,
    "model_type": "STDiT3",
    "num_heads": 16,
    "only_train_temporal": False,
    "patch_size": [1, 2, 2],
    "pred_sigma": True,
    "qk_norm": True,
    "qk_norm_legacy": False,
    "skip_y_embedder": False,
    "torch_dtype": "float32",
    "transformers_version": "4.41.2",
}


def test_the_hubs_config_gives_the_released_sizes() -> None:
    config = STDiT3Config.from_json(HUB)
    assert config == STDiT3Config()
    assert (config.head_size, config.out_channels, config.patch_size) == (72, 8, (1, 2, 2))


def test_a_1_0_config_is_read() -> None:
    config = STDiTConfig.from_json(
        {
            "input_size": [16, 64, 64],
            "space_scale": 1,
            "pred_sigma": False,
            "enable_flashattn": True,
        }
    )
    assert config == STDiTConfig(input_size=(16, 64, 64), space_scale=1, pred_sigma=False)
    assert config.out_channels == 4


def test_an_unknown_key_is_named_with_its_nearest() -> None:
    with pytest.raises(CheckpointError, match=r"'hiden_size'; did you mean 'hidden_size'\?"):
        STDiT3Config.from_json({"hiden_size": 64})
    with pytest.raises(CheckpointError, match="'space_scale'"):
        STDiT3Config.from_json({"space_scale": 0.5})


def test_a_1_0_config_that_leaves_things_out_is_read_as_upstreams_class_does() -> None:
    assert STDiTConfig.from_json({}).space_scale == 1.0  # not the 0.5 of 256 pixels
    # v1.0.0's class takes this switch and never reads it.
    assert STDiTConfig.from_json({"no_temporal_pos_emb": True}) == STDiTConfig()


@pytest.mark.parametrize("name", ["qk_norm_legacy", "skip_y_embedder"])
def test_a_switch_to_another_function_is_refused(name: str) -> None:
    assert STDiT3Config.from_json({name: False}) == STDiT3Config()
    with pytest.raises(CheckpointError, match=name):
        STDiT3Config.from_json({name: True})


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"depth": 0}, "depth must be a whole number above 0, got 0"),
        ({"depth": True}, "depth must be a whole number above 0, got True"),
        ({"depth": "28"}, "depth must be a whole number above 0, got '28'"),
        ({"mlp_ratio": float("nan")}, "mlp_ratio must be a number above 0"),
        ({"qk_norm": 1}, "qk_norm must be true or false, got 1"),
        ({"patch_size": [2, 2]}, "patch_size must be three whole numbers above 0"),
        ({"hidden_size": 66, "num_heads": 6}, "hidden_size must be a multiple of 4"),
        ({"hidden_size": 64, "num_heads": 6}, "num_heads must divide hidden_size, got 6 and 64"),
        ({"hidden_size": 60, "num_heads": 4}, "must be even"),
        ({"model_max_length": 10**9}, "model_max_length is 1000000000; at most"),
    ],
)
def test_sizes_that_cannot_be_are_refused(sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        STDiT3Config.from_json(sizes)

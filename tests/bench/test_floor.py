"""The formulas of the floors, against numbers worked out by hand."""

from __future__ import annotations

import pytest
import torch

from unmask.bench import floor
from unmask.bench.floor import Ceilings, Cost
from unmask.bench.shapes import SHAPES
from unmask.bench.whole_step import cost, kinds
from unmask.cli import bench as cli
from unmask.models.config import ModelConfig
from unmask.models.transformer import Transformer

LLADA, DREAM = SHAPES["llada-8b"], SHAPES["dream-7b"]
H200 = Ceilings(4.18e12, 780e12)


def test_layer_weights_of_llada_8b() -> None:
    """Per layer 4 x 4096^2 + 3 x 4096 x 12288 = 218,103,808; 32 layers in bf16: 13.96 GB."""
    assert floor.layer_parameters(LLADA) == 32 * 218_103_808 == 6_979_321_856
    assert 2 * floor.layer_parameters(LLADA) / 1e9 == pytest.approx(13.96, abs=0.005)


def test_layer_weights_of_dream_7b() -> None:
    """Per layer 3584 x (2 x 3584 + 2 x 512) + 3 x 3584 x 18944 = 233,046,016."""
    assert floor.layer_parameters(DREAM) == 28 * 233_046_016
    assert floor.kv_bytes(DREAM) == 28 * 2 * 4 * 128 * 2 == 57_344


@pytest.mark.parametrize("name", ["mini", "tiny"])
def test_counted_weights_are_those_of_the_network(name: str) -> None:
    model = Transformer(SHAPES[name], device="meta")
    matrices = [weight for each, weight in model.layers.named_parameters() if weight.dim() == 2]
    assert sum(weight.numel() for weight in matrices) == floor.layer_parameters(SHAPES[name])


def test_one_seat_of_128_rows_is_bound_by_its_bytes() -> None:
    """13,958,643,712 of layers + 1,035,993,088 of the head + 524,288 x (1,536 read + 128 written) = 15,867,052,032."""
    found = floor.step_cost(LLADA, seats=1, rows=128, scored=16, keys=1536)
    assert found.num_bytes == 13_958_643_712 + 1_035_993_088 + 524_288 * 1664 == 15_867_052_032
    assert found.bound_by(H200) == "bytes"
    assert 1e3 * found.seconds(H200) == pytest.approx(3.796, abs=1e-3)


def test_32_seats_of_128_rows_are_bound_by_their_flops() -> None:
    """Products 2 x 4,096 x 6,979,321,856; head 2 x 512 x 517,996,544; attention 4 x 4,096 x 1,536 x 4,096 x 32."""
    found = floor.step_cost(LLADA, seats=32, rows=128, scored=16, keys=1536)
    assert found.num_flops == 57_174_604_644_352 + 530_428_461_056 + 3_298_534_883_328
    assert found.num_bytes == 13_958_643_712 + 1_035_993_088 + 524_288 * 32 * 1664
    assert found.bound_by(H200) == "flops"
    assert 1e3 * found.seconds(H200) == pytest.approx(78.21, abs=0.01)


def test_a_second_pass_reads_the_weights_again() -> None:
    named = kinds()
    one, two = (cost(named[name], LLADA, 1, 1536, 2) for name in ("flash-cache", "flash-dllm"))
    again = floor.step_cost(LLADA, seats=1, rows=32, scored=8, keys=1536)
    assert two == one + again
    assert named["flash-dllm"].second_rows == 32
    assert named["flash-cache"].second_rows == 0
    assert named["142 rows"].rows == 128 + 2 * (8 - 1)


def test_operations() -> None:
    assert floor.linear_cost(2, 3, 5) == Cost(2 * (15 + 6 + 10), 60)
    assert floor.linear_cost(2, 3, 5, size=4).num_bytes == 2 * floor.linear_cost(2, 3, 5).num_bytes
    assert floor.project_cost(16, 4096, 32, 32, 128).num_flops == 2 * 16 * 4096 * 12288
    assert floor.project_cost(16, 4096, 32, 32, 128).num_bytes == 2 * (4096 * 12288 + 16 * 16384) + 16 * 128 * 4
    assert floor.attend_cost(32, 128, 1536, 32, 32, 128) == Cost(805_306_368, 103_079_215_104)
    assert floor.stats_cost(2048, 4096, 126464).num_bytes == 2 * 4096 * (126464 + 2048)
    assert floor.elementwise_cost(3, 2) == Cost(10)


def test_passes_add_up() -> None:
    """Several passes of several seats are the sum of theirs."""
    one = floor.step_cost(LLADA, seats=2, rows=16, scored=4, keys=64)
    three = floor.pass_cost(LLADA, rows=96, scored=24, keys_read=384, row_keys=96 * 64, passes=3)
    assert three == one + one + one


def test_parts_in_turn_take_longer_than_all_at_once() -> None:
    """At 64 seats of 16 rows attention is bound by bytes and products by FLOPs; at one seat all are by bytes."""
    crowd = floor.step_parts(LLADA, seats=64, rows=16, scored=16, keys=1536)
    assert [crowd[name].bound_by(H200) for name in ("products", "attention", "head")] == ["flops", "bytes", "flops"]
    assert floor.seconds_in_turn(crowd, H200) > 1.3 * sum(crowd.values(), Cost()).seconds(H200)
    alone = floor.step_parts(LLADA, seats=1, rows=16, scored=16, keys=1536)
    assert floor.seconds_in_turn(alone, H200) == pytest.approx(sum(alone.values(), Cost()).seconds(H200))


def test_ceilings_are_measured() -> None:
    found = floor.measure_ceilings("cpu", num_bytes=1 << 12, size=16)
    assert found.bytes_per_second > 0
    assert found.flops_per_second > 0


def test_the_command_line_knows_every_shape_and_operation() -> None:
    from unmask.bench import kernels, whole_step

    assert tuple(SHAPES) == cli.SHAPES
    assert kernels.OPS == cli.OPS
    assert whole_step.PARTS == cli.PARTS


def test_shapes_are_those_of_the_catalogue() -> None:
    from unmask.cli import catalog

    for name, sizes in (("llada-8b", catalog.LLADA), ("dream-7b", catalog.DREAM)):
        assert {each: getattr(SHAPES[name], each) for each in vars(sizes)} == vars(sizes)


def test_mini_has_the_shape_that_ships() -> None:
    from unmask.cli.catalog import shipped_dir

    directory = shipped_dir()
    if directory is None:
        pytest.skip("the model is not in this checkout")
    ships, mini = ModelConfig.from_pretrained(directory), SHAPES["mini"]
    for name in ("vocab_size", "hidden_size", "num_layers", "num_heads", "head_dim", "intermediate_size"):
        assert getattr(ships, name) == getattr(mini, name)


def test_dtype_of_a_cpu() -> None:
    from unmask.bench.shapes import ordinary_ids, random_network

    network = random_network("tiny", "cpu", max_positions=5000)
    assert network.head.dtype == torch.float32
    assert network.config.max_positions == 5000
    ids = ordinary_ids(network.config, 2000, 0)
    assert not set(ids.tolist()) & {network.config.mask_token_id, *network.config.eos_token_ids}
    assert int(ids.min()) >= 0
    assert int(ids.max()) < network.config.vocab_size

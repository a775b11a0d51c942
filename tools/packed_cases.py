#!/usr/bin/env python3
"""Writes weights in the layouts of other quantizers, with what the libraries of the formats read from them.

    pip install torch transformers safetensors compressed-tensors bitsandbytes
    pip install --no-build-isolation gptqmodel
    pip install --no-build-isolation --no-deps autoawq
    python3 tools/packed_cases.py                  # the files in models/tests/data/packed

A file `NAME.safetensors` has the stored tensors of one weight, and `expected`, the floats as the library has them; the metadata
has config.json's `quantization_config` as text, and the name of the weight. Codes and scales are random, from a fixed seed.
Codes and scales go through the library's own dequantization with scales in float32, so nothing is rounded but the products.
"""

import importlib.util
import json
import pathlib
import sys

import numpy as np
import torch
from safetensors.torch import save_file

DATA = pathlib.Path(__file__).parent.parent / "models/tests/data/packed"
FP8 = torch.float8_e4m3fn
random = np.random.default_rng(24)


def scales(*shape, dtype=torch.float16):
    return torch.tensor(random.uniform(0.01, 0.1, shape), dtype=torch.float32).to(dtype)


def words(*shape):
    return torch.tensor(random.integers(-(2**31), 2**31, shape), dtype=torch.int64).to(torch.int32)


def signed(bits, *shape):
    return torch.tensor(random.integers(-(2 ** (bits - 1)), 2 ** (bits - 1), shape), dtype=torch.int8)


def fp8(*shape):
    return torch.tensor(random.normal(0, 20, shape), dtype=torch.float32).to(FP8)


def source(package, path):
    """A file of a package, without what the package imports."""
    root = importlib.util.find_spec(package).submodule_search_locations[0]
    spec = importlib.util.spec_from_file_location(pathlib.Path(path).stem, pathlib.Path(root) / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def awq():
    packing = source("awq", "utils/packing_utils.py")
    inputs, outputs, group = 96, 40, 32
    stored = {"qweight": words(inputs, outputs // 8), "qzeros": words(inputs // group, outputs // 8),
              "scales": scales(inputs // group, outputs)}
    expected = packing.dequantize_gemm(stored["qweight"], stored["qzeros"], stored["scales"].float(), 4, group).T
    yield "awq", {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm", "zero_point": True}, stored, expected


def gptq():
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.utils.model import convert_gptq_v1_to_v2_format_module

    for name, bits, form, act_order in (("gptq-4", 4, "gptq", False), ("gptq-8", 8, "gptq", False),
                                        ("gptq-v2", 4, "gptq_v2", False), ("gptq-act-order", 4, "gptq", True),
                                        ("gptq-2", 2, "gptq_v2", False)):
        inputs, outputs, group = 96, 64, 32
        layer = TorchLinear(bits=bits, group_size=group, sym=False, desc_act=act_order, in_features=inputs,
                            out_features=outputs, bias=False, pack_dtype=torch.int32, register_buffers=True)
        zeros = random.integers(0, 2**bits - 1, (inputs // group, outputs))
        packed = np.zeros((inputs // group, outputs * bits // 32), dtype=np.uint64)
        for lane in range(32 // bits):
            packed |= zeros[:, lane :: 32 // bits].astype(np.uint64) << np.uint64(bits * lane)
        groups = np.arange(inputs) // group
        if act_order:
            random.shuffle(groups)
        stored = {"qweight": words(inputs * bits // 32, outputs), "scales": scales(inputs // group, outputs),
                  "qzeros": torch.tensor(packed.astype(np.uint32).view(np.int32)),
                  "g_idx": torch.tensor(groups, dtype=torch.int32)}
        for part, tensor in stored.items():
            getattr(layer, part).data = tensor.clone()
        layer.scales.data = layer.scales.float()
        layer.dequant_dtype = torch.int16
        if form == "gptq":
            convert_gptq_v1_to_v2_format_module(layer, bits, torch.int32)
        layer.post_init()
        config = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": act_order, "sym": False,
                  "checkpoint_format": form}
        if not act_order and name != "gptq-4":
            del stored["g_idx"]
        yield name, config, stored, layer.dequantize_weight().T


def compressed_tensors():
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    rows, columns = 24, 96

    def case(name, form, weights, stored):
        scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))
        library = {key: tensor.float() if key == "weight_scale" and tensor.dtype in (torch.bfloat16, torch.float16)
                   else tensor.clone() for key, tensor in stored.items()}
        if form == "nvfp4-pack-quantized":
            # The compressor itself rounds to bfloat16 on the way.
            expected = dequantize(unpack_fp4_from_uint8(stored["weight_packed"], rows, columns).float(),
                                  stored["weight_scale"].float(), args=scheme.weights, dtype=torch.float32,
                                  global_scale=stored["weight_global_scale"])
        else:
            expected = BaseCompressor.get_value_from_registry(form).decompress(library, scheme)["weight"]
        config = {"quant_method": "compressed-tensors", "format": form, "ignore": ["lm_head", "re:.*router.*"],
                  "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}
        return name, config, stored, expected

    shape = torch.tensor([rows, columns])
    for name, bits, group, symmetric in (("ct-int4", 4, 32, True), ("ct-int4-zeros", 4, 32, False), ("ct-int8-channel", 8, None, False)):
        groups = columns // group if group else 1
        stored = {"weight_packed": pack_to_int32(signed(bits, rows, columns), bits), "weight_shape": shape,
                  "weight_scale": scales(rows, groups, dtype=torch.bfloat16)}
        if not symmetric:
            stored["weight_zero_point"] = pack_to_int32(signed(bits, rows, groups), bits, packed_dim=0).contiguous()
        weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": "group" if group else "channel"}
        yield case(name, "pack-quantized", weights | ({"group_size": group} if group else {}), stored)
    float8 = {"num_bits": 8, "type": "float", "symmetric": True}
    yield case("ct-fp8-channel", "float-quantized", float8 | {"strategy": "channel"},
               {"weight": fp8(rows, columns), "weight_scale": scales(rows, 1, dtype=torch.bfloat16)})
    yield case("ct-fp8-tensor", "float-quantized", float8 | {"strategy": "tensor"},
               {"weight": fp8(rows, columns), "weight_scale": scales(1, dtype=torch.bfloat16), "input_scale": scales(1)})
    yield case("ct-int8", "int-quantized", {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"},
               {"weight": signed(8, rows, columns), "weight_scale": scales(rows, 1, dtype=torch.bfloat16)})
    codes = torch.tensor(random.integers(0, 256, (rows, columns // 2)), dtype=torch.uint8)
    yield case("ct-nvfp4", "nvfp4-pack-quantized",
               {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16},
               {"weight_packed": codes, "weight_scale":
                torch.tensor(random.uniform(1, 400, (rows, columns // 16)), dtype=torch.float32).to(FP8),
                "weight_global_scale": torch.tensor([1234.5])})


def fp8_blocks():
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    for name, rows, columns, block in (("fp8-block", 64, 96, [32, 32]), ("fp8-tensor", 24, 40, None)):
        grid = [rows // block[0], columns // block[1]] if block else []
        stored = {"weight": fp8(rows, columns), "weight_scale_inv": scales(*grid, dtype=torch.float32)}
        grid_scales = stored["weight_scale_inv"].reshape(grid or [1, 1])
        expected = Fp8Dequantize(None)._dequantize_one(stored["weight"], grid_scales, torch.float32)
        config = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": block}
        yield name, config, stored, expected


def mxfp4():
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    experts, rows, groups = 3, 12, 2
    blocks = torch.tensor(random.integers(0, 256, (experts, rows, groups, 16)), dtype=torch.uint8)
    exponents = torch.tensor(random.integers(110, 130, (experts, rows, groups)), dtype=torch.uint8)
    expected = convert_moe_packed_tensors(blocks, exponents, dtype=torch.float32)
    yield "mxfp4", {"quant_method": "mxfp4"}, {"proj_blocks": blocks, "proj_scales": exponents}, expected


def bits_and_bytes():
    import bitsandbytes.functional as bnb

    for name, kind, nested, shape, block in (("nf4", "nf4", False, (24, 128), 64), ("nf4-nested", "nf4", True, (40, 96), 64),
                                             ("fp4", "fp4", False, (8, 64), 64)):
        weight = torch.tensor(random.normal(0, 0.02, shape), dtype=torch.float32)
        codes, state = bnb.quantize_4bit(weight, blocksize=block, compress_statistics=nested, quant_type=kind)
        stored = {"weight": codes} | {f"weight.{key}": value for key, value in state.as_dict(packed=True).items()}
        # On CPUs the library takes blocks that go from one row to the next for blocks of rows: hand it rows of whole blocks.
        state.shape = torch.Size((weight.numel() // block, block))
        expected = bnb.dequantize_4bit(codes, state).reshape(shape)
        yield name, {"quant_method": "bitsandbytes", "load_in_4bit": True}, stored, expected


def main():
    DATA.mkdir(parents=True, exist_ok=True)
    kinds = {f.__name__: f for f in (awq, gptq, compressed_tensors, fp8_blocks, mxfp4, bits_and_bytes)}
    for kind in sys.argv[1:] or kinds:
        for name, config, stored, expected in kinds[kind]():
            tensors = {f"layer.{part}": tensor.contiguous() for part, tensor in stored.items()}
            tensors["expected"] = expected.float().contiguous()
            weight = "layer.proj" if kind == "mxfp4" else "layer.weight"
            metadata = {"quantization_config": json.dumps(config), "weight": weight}
            save_file(tensors, DATA / f"{name}.safetensors", metadata)
            print(name, tuple(expected.shape))


if __name__ == "__main__":
    main()

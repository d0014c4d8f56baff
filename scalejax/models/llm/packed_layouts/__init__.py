"""Layouts of quantized checkpoints: the tensors that a weight becomes, and what config.json says of it.

A weight [rows, columns] is quantized along its columns, over which products sum. n blocks of k1 values cover a row:

    scalejax            WEIGHT.FORMAT.codes         uint8 [rows, n k1 bits / 8]   streams of bits, see numerics.packing
                        WEIGHT.FORMAT.scales        uint8 or float32 [rows, n]
                        WEIGHT.FORMAT.sub_scales    uint8 [rows, n k1 d2 / (8 k2)]         where the format has them
                        WEIGHT.FORMAT.tensor_scale  float32 []                             where the format has one
                        WEIGHT.inputs.FORMAT.scale  float32 []                             where inputs have one
    compressed-tensors  M.weight_packed             uint8, or int32 of integers + 2^(bits - 1), least first
                        M.weight                    instead of it: float8_e4m3 or int8 [rows, columns]
                        M.weight_scale              uint8 (E8M0), float8_e4m3 (NVFP4) or float32 [rows, n]
                        M.weight_global_scale       float32 [1], NVFP4: what scales are *divided* by
                        M.weight_shape              int64 [2], beside int32
                        M.input_scale               float32 [1], of what the weight multiplies
                        M.input_global_scale        float32 [1], instead of it, NVFP4: what is *divided* by
    gpt-oss             WEIGHT_blocks               uint8 [rows, n, 16], MXFP4, first number in the low nibble
                        WEIGHT_scales               uint8 [rows, n], E8M0

where WEIGHT is the tensor's name and M that name without ".weight". The global scale of NVFP4 is one over the tensor
scale g of `numerics`: other writers of NVFP4 store g itself, under other names, and a reader that takes one for the
other generates nonsense.

`protocol` says what a layout can do, each layout has a module, and `known` finds one by its name.

Source: https://github.com/neuralmagic/compressed-tensors and transformers' integration of mxfp4, as of 2026.
"""

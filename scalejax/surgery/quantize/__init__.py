"""Post-training quantization of language models: a folder in, a folder with packed weights out.

plan         which weights take which format, by rules
calibration  scales of blocks: from the largest magnitude, a percentile, or the least squared error
diffusion    rounding column by column, each error passed on to the columns that are still to come
activations  what the matrices of a Llama multiply in calibration text, layer by layer
checkpoint   the folder, one weight in memory at a time, and a report
"""

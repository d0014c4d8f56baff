"""Click models in low precision: quantized after training, searched under a budget, watched, and exported.

    model = click_model.load(run_folder, experiment)              # a trained model, on one device
    limits = calibration.limits(model, batches)                   # ranges of activations, by histograms
    found = search.search(study, budget=5e-4)                     # a precision for every table and operator
    lowered = lowering.lower(model, found.precisions, limits)     # packed rows, int8 and float16 weights
    guard.Guard(model, lowered, budget=5e-4)                      # float beside it on a sample of the traffic
    export.write(model, lowered, folder)                          # StableHLO and safetensors

Source: Z. Deng et al., "Low-Precision Hardware Architectures Meet Recommendation Model Inference at Scale", IEEE Micro
41(5), 2021 (arXiv 2105.12676).
"""

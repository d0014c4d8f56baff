"""What follows a run from outside: TensorBoard, Weights & Biases, trackio, or a tracker of yours (`protocol`).

An experiment names them, `Experiment(trackers=(TensorBoard(), Wandb(project="clicks")))`, and process 0 starts them.
"""

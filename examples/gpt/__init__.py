"""The parts of the example `train_gpt.py`; read model.py, then train.py."""

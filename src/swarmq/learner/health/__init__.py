"""Health of a training: signs of collapse and trends in the metrics of its steps. Pure, without torch.

The batch feeder watches them during training (`signs.SignWatch`), `swarmq doctor` reports them afterwards. `findings` is the record of
what a check found.
"""

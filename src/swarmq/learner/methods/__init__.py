"""Methods of training, each a pure function in a file of its own: losses and advantages by name, and own ones by `module:function`.

The trainer's ranks and the batch feeder find them through `registry`. `credit`, `advantages`, `registry` and `loss_effects`
import no torch.
"""

"""Methods of training, each a pure function in a file of its own: built-in losses and advantages by name, and the user's own by
`module:function`.

The trainer's ranks and the batch feeder find them through `registry`. `credit`, `advantages`, `registry` and `loss_effects`
import no torch.
"""

"""The exponential moving average of a model's parameters (--store-ema)."""

from multimax_fairseq.compat.checkpoints import glance
from multimax_fairseq.compat.patch import wrap


def ema_step():
    """Tied embeddings decay once per name, and a pre-norm model's last layer norm is lost.

    The state dict has an entry for each name of a tied parameter, and fairseq decays every entry.
    It then loads a state dict without version entries, so the decoder takes it for an old
    checkpoint and removes its last layer norm.
    Can go when fairseq decays each tensor once, in place.
    """
    from fairseq.models.ema import EMA

    def make(original):
        def _step_internal(self, new_model, updates=None):
            parameters, model = new_model.state_dict(), self.model.state_dict()
            averages = self.fp32_params if self.config.ema_fp32 else model
            decayed = set()
            for name in model:
                average = averages[name]
                if "version" in name or average.data_ptr() in decayed:
                    continue
                decayed.add(average.data_ptr())
                decay = 0 if name in self.skip_keys else self.decay
                average.mul_(decay).add_(parameters[name].to(average.dtype), alpha=1 - decay)
                model[name].copy_(average)

        return _step_internal

    wrap(EMA, "_step_internal", make)


def ema_frequency():
    """--ema-update-freq counts from the start of the process, so a resumed run averages at other
    updates.

    Can go when fairseq saves its count, or takes the number of updates, as here.
    """
    from fairseq.models.ema import EMA

    def make(original):
        def step(self, new_model, updates=None):
            if updates is not None:
                self.update_freq_counter = (updates - 1) % max(1, self.config.ema_update_freq)
            original(self, new_model, updates)

        return step

    wrap(EMA, "step", make)


def ema_of_resumed_run():
    """Adding --store-ema to a run that is resumed ends in a KeyError.

    fairseq deletes the checkpoint's parameters, then tries to start the average from them. Here it
    starts from the model that has loaded them. Can go when fairseq does so.
    """
    from fairseq.trainer import Trainer

    def make(original):
        def load_checkpoint(self, filename, *args, **kwargs):
            settings = self.cfg.ema
            stores_ema = settings.store_ema
            if stores_ema and glance(filename, lambda state: "ema" not in state["extra_state"]):
                settings.store_ema = False
            try:
                loaded = original(self, filename, *args, **kwargs)
            finally:
                settings.store_ema = stores_ema
            if loaded is not None and self._ema is None:
                self._build_ema()
            return loaded

        return load_checkpoint

    wrap(Trainer, "load_checkpoint", make)

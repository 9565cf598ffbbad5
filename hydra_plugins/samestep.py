"""Registers the schema with Hydra: wrong types and unknown keys are refused by any composer.

Hydra imports every module below `hydra_plugins/`, for `dvc exp run -S` just as for compose.
"""

from hydra.core.config_store import ConfigStore

from stages.core.config.schema import Settings

ConfigStore.instance().store(name="schema", node=Settings, provider="samestep")

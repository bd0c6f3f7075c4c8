"""Conversion: whole memories compared byte for byte with an independent writer's."""

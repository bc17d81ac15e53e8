"""Mixture-of-experts layers: routers, dispatch, experts and their balance."""

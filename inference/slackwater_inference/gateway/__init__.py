"""The one address for API clients on one machine: a bounded queue before the engine replicas."""

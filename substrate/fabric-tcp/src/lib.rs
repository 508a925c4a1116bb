//! Fabric provider over TCP: a library thread executes one-sided operations at the target.

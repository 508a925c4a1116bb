//! Operating-system mechanisms: mappings, shared objects, event descriptors, processes, processors.

//! Durable memory: pools of segments; map, flush, fence; a simulated device yields every legal crash image.

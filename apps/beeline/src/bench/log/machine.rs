//! The state machine of the benchmark: it counts.

use std::io::{self, Read, Write};

use beeline_replicated_log::{Position, SnapshotWriter, StateMachine};

/// Counts commands and their bytes; its snapshot is as long as what it was told.
#[derive(Debug, Default)]
pub struct Counter {
    /// Commands applied.
    pub commands: u64,
    /// Bytes of them.
    pub bytes: u64,
}

impl StateMachine for Counter {
    fn apply(&mut self, _position: Position, command: &[u8], reply: &mut Vec<u8>) {
        self.commands += 1;
        self.bytes += command.len() as u64;
        reply.extend_from_slice(&self.commands.to_le_bytes());
    }

    fn snapshot(&mut self) -> io::Result<SnapshotWriter> {
        let (commands, bytes) = (self.commands, self.bytes);
        Ok(Box::new(move |out: &mut dyn Write| {
            out.write_all(&commands.to_le_bytes())?;
            out.write_all(&bytes.to_le_bytes())?;
            // As long as a state that keeps everything.
            let chunk = vec![7; 1 << 16];
            let mut left = bytes as usize;
            while left > 0 {
                let piece = left.min(chunk.len());
                out.write_all(&chunk[..piece])?;
                left -= piece;
            }
            Ok(())
        }))
    }

    fn restore(&mut self, _position: Position, reader: &mut dyn Read) -> io::Result<()> {
        let mut word = [0; 8];
        reader.read_exact(&mut word)?;
        self.commands = u64::from_le_bytes(word);
        reader.read_exact(&mut word)?;
        self.bytes = u64::from_le_bytes(word);
        let read = io::copy(reader, &mut io::sink())?;
        if read == self.bytes { Ok(()) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
    }

    fn query(&mut self, _query: &[u8], reply: &mut Vec<u8>) {
        reply.extend_from_slice(&self.commands.to_le_bytes());
    }
}

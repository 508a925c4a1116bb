//! The device's completion codes as fabric's.

use std::ffi::c_int;

use beeline_fabric::{Opcode, Status};

use crate::abi::wc_status as wc;

/// What a request's completion code means at the end that posted it.
pub(crate) fn of_send(code: c_int, opcode: Opcode) -> Status {
    match code {
        wc::SUCCESS => Status::Success,
        wc::WR_FLUSH_ERR => Status::Flushed,
        wc::REM_ACCESS_ERR | wc::REM_INV_RD_REQ_ERR => Status::RemoteAccessError,
        // A receiver whose buffer is too short has no other word for it.
        // Soft-RoCE says that the peer could not carry the operation out.
        wc::REM_INV_REQ_ERR | wc::REM_OP_ERR if opcode == Opcode::Send => Status::LengthError,
        wc::REM_INV_REQ_ERR => Status::RemoteInvalidRequest,
        wc::RNR_RETRY_EXC_ERR => Status::ReceiverNotReady,
        wc::LOC_LEN_ERR => Status::LengthError,
        // The peer's device could not do its part, the link died, or our own broke.
        _ => Status::TransportError,
    }
}

/// What a receive's completion code means.
pub(crate) fn of_receive(code: c_int) -> Status {
    match code {
        wc::SUCCESS => Status::Success,
        wc::WR_FLUSH_ERR => Status::Flushed,
        // Devices differ in which of these they report for a message longer than its receive.
        wc::LOC_LEN_ERR | wc::REM_INV_REQ_ERR | wc::LOC_QP_OP_ERR => Status::LengthError,
        _ => Status::TransportError,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_has_a_meaning_and_only_one_is_success() {
        let opcodes = [Opcode::Write, Opcode::Send, Opcode::Read, Opcode::FetchAndAdd];
        for code in 0..64 {
            for opcode in opcodes {
                assert_eq!(of_send(code, opcode) == Status::Success, code == 0);
            }
            assert_eq!(of_receive(code) == Status::Success, code == 0);
        }
    }

    #[test]
    fn refusals_keep_their_meaning() {
        assert_eq!(of_send(wc::REM_ACCESS_ERR, Opcode::Write), Status::RemoteAccessError);
        assert_eq!(of_send(wc::REM_INV_REQ_ERR, Opcode::FetchAndAdd), Status::RemoteInvalidRequest);
        assert_eq!(of_send(wc::REM_INV_REQ_ERR, Opcode::Send), Status::LengthError);
        assert_eq!(of_send(wc::RNR_RETRY_EXC_ERR, Opcode::Send), Status::ReceiverNotReady);
        assert_eq!(of_send(wc::RETRY_EXC_ERR, Opcode::Read), Status::TransportError);
        assert_eq!(of_send(wc::WR_FLUSH_ERR, Opcode::Read), Status::Flushed);
        assert_eq!(of_receive(wc::LOC_LEN_ERR), Status::LengthError);
    }
}

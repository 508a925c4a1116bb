//! The binary interface of libibverbs, as its public header has kept it since version 1.1.
//!
//! Only what this crate touches is declared. Structures that the library allocates are declared up
//! to the last field read here and are only ever used behind pointers the library gave; structures
//! that this crate allocates are complete. Sizes and offsets are asserted at compile time, and a
//! test compares them with the header of the machine where there is a compiler and a header.

#![allow(dead_code, reason = "constants of one enumeration stand together, used or not")]

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::mem::{offset_of, size_of};

/// `IBV_SYSFS_NAME_MAX`.
pub(crate) const NAME_BYTES: usize = 64;
/// `IBV_SYSFS_PATH_MAX`.
pub(crate) const PATH_BYTES: usize = 256;

/// `struct ibv_device`.
#[repr(C)]
pub(crate) struct Device {
    operations: [*mut c_void; 2],
    pub(crate) node_type: c_int,
    pub(crate) transport_type: c_int,
    pub(crate) name: [c_char; NAME_BYTES],
    pub(crate) dev_name: [c_char; NAME_BYTES],
    pub(crate) dev_path: [c_char; PATH_BYTES],
    pub(crate) ibdev_path: [c_char; PATH_BYTES],
}

/// `IBV_TRANSPORT_IB`.
pub(crate) const TRANSPORT_IB: c_int = 0;

pub(crate) type PollCq = unsafe extern "C" fn(*mut Cq, c_int, *mut Wc) -> c_int;
pub(crate) type ReqNotifyCq = unsafe extern "C" fn(*mut Cq, c_int) -> c_int;
pub(crate) type PostSrqRecv =
    unsafe extern "C" fn(*mut Srq, *mut RecvWr, *mut *mut RecvWr) -> c_int;
pub(crate) type PostSend = unsafe extern "C" fn(*mut Qp, *mut SendWr, *mut *mut SendWr) -> c_int;
pub(crate) type PostRecv = unsafe extern "C" fn(*mut Qp, *mut RecvWr, *mut *mut RecvWr) -> c_int;

/// `struct ibv_context_ops`: the data path's function pointers among others nobody calls.
#[repr(C)]
pub(crate) struct ContextOps {
    compat_0: [*mut c_void; 7],
    memory_windows: [*mut c_void; 3],
    compat_1: *mut c_void,
    pub(crate) poll_cq: Option<PollCq>,
    pub(crate) req_notify_cq: Option<ReqNotifyCq>,
    compat_2: [*mut c_void; 7],
    pub(crate) post_srq_recv: Option<PostSrqRecv>,
    compat_3: [*mut c_void; 4],
    pub(crate) post_send: Option<PostSend>,
    pub(crate) post_recv: Option<PostRecv>,
    compat_4: [*mut c_void; 5],
}

/// `struct ibv_context`, up to the event descriptor.
#[repr(C)]
pub(crate) struct Context {
    pub(crate) device: *mut Device,
    pub(crate) ops: ContextOps,
    pub(crate) cmd_fd: c_int,
    pub(crate) async_fd: c_int,
    pub(crate) num_comp_vectors: c_int,
}

/// `struct ibv_device_attr`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct DeviceAttr {
    pub(crate) fw_ver: [c_char; 64],
    pub(crate) node_guid: u64,
    pub(crate) sys_image_guid: u64,
    pub(crate) max_mr_size: u64,
    pub(crate) page_size_cap: u64,
    pub(crate) vendor_id: u32,
    pub(crate) vendor_part_id: u32,
    pub(crate) hw_ver: u32,
    pub(crate) max_qp: c_int,
    pub(crate) max_qp_wr: c_int,
    pub(crate) device_cap_flags: c_uint,
    pub(crate) max_sge: c_int,
    pub(crate) max_sge_rd: c_int,
    pub(crate) max_cq: c_int,
    pub(crate) max_cqe: c_int,
    pub(crate) max_mr: c_int,
    pub(crate) max_pd: c_int,
    pub(crate) max_qp_rd_atom: c_int,
    pub(crate) max_ee_rd_atom: c_int,
    pub(crate) max_res_rd_atom: c_int,
    pub(crate) max_qp_init_rd_atom: c_int,
    pub(crate) max_ee_init_rd_atom: c_int,
    pub(crate) atomic_cap: c_int,
    pub(crate) max_ee: c_int,
    pub(crate) max_rdd: c_int,
    pub(crate) max_mw: c_int,
    pub(crate) max_raw_ipv6_qp: c_int,
    pub(crate) max_raw_ethy_qp: c_int,
    pub(crate) max_mcast_grp: c_int,
    pub(crate) max_mcast_qp_attach: c_int,
    pub(crate) max_total_mcast_qp_attach: c_int,
    pub(crate) max_ah: c_int,
    pub(crate) max_fmr: c_int,
    pub(crate) max_map_per_fmr: c_int,
    pub(crate) max_srq: c_int,
    pub(crate) max_srq_wr: c_int,
    pub(crate) max_srq_sge: c_int,
    pub(crate) max_pkeys: u16,
    pub(crate) local_ca_ack_delay: u8,
    pub(crate) phys_port_cnt: u8,
}

/// `IBV_ATOMIC_NONE`.
pub(crate) const ATOMIC_NONE: c_int = 0;
/// `IBV_ATOMIC_GLOB`: atomic with the processor's own as well.
pub(crate) const ATOMIC_GLOB: c_int = 2;

/// `struct ibv_device_attr_ex`. The library fills as much of it as it knows and is told.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct DeviceAttrEx {
    pub(crate) original: DeviceAttr,
    pub(crate) comp_mask: u32,
    pub(crate) odp_caps: OdpCaps,
    completion_timestamp_mask: u64,
    hca_core_clock: u64,
    pub(crate) device_cap_flags_ex: u64,
    tso_caps: [u32; 2],
    rss_caps: [u64; 4],
    max_wq_type_rq: u32,
    packet_pacing_caps: [u32; 3],
    raw_packet_caps: u32,
    tm_caps: [u32; 5],
    pub(crate) max_cq_count: u16,
    pub(crate) max_cq_period_us: u16,
    max_dm_size: u64,
    pci_atomic_caps: [u16; 3],
    xrc_odp_caps: u32,
    phys_port_cnt_ex: u32,
}

/// `struct ibv_odp_caps`: on-demand paging, registered memory that is not pinned.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct OdpCaps {
    pub(crate) general: u64,
    pub(crate) rc: u32,
    uc: u32,
    ud: u32,
}

/// `enum ibv_odp_transport_cap_bits`: all that fabric's requests need, atomics included.
pub(crate) const ODP_RC_WHOLE: u32 = 0b1_1111;

/// `RXE_VENDOR_ID`: soft-RoCE.
const VENDOR_SOFT_ROCE: u32 = 0xff_ffff;

impl DeviceAttrEx {
    /// True when every request of a reliable connection may meet memory that is not pinned.
    ///
    /// Not on soft-RoCE, which claims it from Linux 6.15 on: it takes the address a region is
    /// registered at for one of this process, finds no page there, and the kernel crashes (seen
    /// with 7.3.4). Ours are registered at addresses of our choosing.
    pub(crate) fn pages_on_demand(&self) -> bool {
        let OdpCaps { general, rc, .. } = self.odp_caps;
        let claimed = general & 1 != 0 && rc & ODP_RC_WHOLE == ODP_RC_WHOLE;
        claimed && self.original.vendor_id != VENDOR_SOFT_ROCE
    }
}

/// `IB_UVERBS_DEVICE_FLUSH_GLOBAL`: the device's FLUSH operation reaches global visibility.
pub(crate) const CAP_FLUSH_GLOBAL: u64 = 1 << 38;
/// `IB_UVERBS_DEVICE_FLUSH_PERSISTENT`: the device's FLUSH operation reaches persistence.
pub(crate) const CAP_FLUSH_PERSISTENT: u64 = 1 << 39;

pub(crate) type QueryDeviceEx =
    unsafe extern "C" fn(*mut Context, *const c_void, *mut DeviceAttrEx, usize) -> c_int;
pub(crate) type ModifyCq = unsafe extern "C" fn(*mut Cq, *mut ModifyCqAttr) -> c_int;

/// The end of `struct verbs_context`, which lies in memory right before `struct ibv_context` and
/// grows towards lower addresses.
#[repr(C)]
pub(crate) struct ContextExtension {
    pub(crate) modify_cq: Option<ModifyCq>,
    not_used_0: [*mut c_void; 8],
    private: *mut c_void,
    pub(crate) query_device_ex: Option<QueryDeviceEx>,
    not_used_1: [*mut c_void; 10],
    placeholder: u64,
    /// Bytes of the whole `struct verbs_context`, as the library has it.
    pub(crate) size: usize,
}

/// Bytes of `struct ibv_context`, which the size above includes.
pub(crate) const CONTEXT_BYTES: usize = if cfg!(target_arch = "aarch64") { 336 } else { 328 };
/// Offset of `abi_compat` in `struct ibv_context`: all ones when the extension is there.
pub(crate) const ABI_COMPAT_OFFSET: usize = CONTEXT_BYTES - 8;

/// `struct ibv_modify_cq_attr`.
#[repr(C)]
pub(crate) struct ModifyCqAttr {
    pub(crate) attr_mask: u32,
    pub(crate) cq_count: u16,
    pub(crate) cq_period_us: u16,
}

/// `IBV_CQ_ATTR_MODERATE`.
pub(crate) const CQ_ATTR_MODERATE: u32 = 1;

/// `struct ibv_port_attr`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct PortAttr {
    pub(crate) state: c_int,
    pub(crate) max_mtu: c_int,
    pub(crate) active_mtu: c_int,
    pub(crate) gid_tbl_len: c_int,
    pub(crate) port_cap_flags: u32,
    pub(crate) max_msg_sz: u32,
    pub(crate) bad_pkey_cntr: u32,
    pub(crate) qkey_viol_cntr: u32,
    pub(crate) pkey_tbl_len: u16,
    pub(crate) lid: u16,
    pub(crate) sm_lid: u16,
    pub(crate) lmc: u8,
    pub(crate) max_vl_num: u8,
    pub(crate) sm_sl: u8,
    pub(crate) subnet_timeout: u8,
    pub(crate) init_type_reply: u8,
    pub(crate) active_width: u8,
    pub(crate) active_speed: u8,
    pub(crate) phys_state: u8,
    pub(crate) link_layer: u8,
    pub(crate) flags: u8,
    pub(crate) port_cap_flags2: u16,
}

/// `IBV_PORT_ACTIVE`.
pub(crate) const PORT_ACTIVE: c_int = 4;
/// `IBV_LINK_LAYER_INFINIBAND`.
pub(crate) const LINK_INFINIBAND: u8 = 1;
/// `IBV_LINK_LAYER_ETHERNET`.
pub(crate) const LINK_ETHERNET: u8 = 2;

/// `union ibv_gid`.
#[repr(C, align(8))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Gid(pub(crate) [u8; 16]);

/// `struct ibv_pd`, a prefix.
#[repr(C)]
pub(crate) struct Pd {
    pub(crate) context: *mut Context,
}

/// `struct ibv_mr`.
#[repr(C)]
pub(crate) struct Mr {
    context: *mut Context,
    pd: *mut Pd,
    addr: *mut c_void,
    length: usize,
    handle: u32,
    pub(crate) lkey: u32,
    pub(crate) rkey: u32,
}

/// `struct ibv_comp_channel`, a prefix.
#[repr(C)]
pub(crate) struct CompChannel {
    context: *mut Context,
    pub(crate) fd: c_int,
}

/// `struct ibv_cq`, a prefix.
#[repr(C)]
pub(crate) struct Cq {
    pub(crate) context: *mut Context,
    channel: *mut CompChannel,
    pub(crate) cq_context: *mut c_void,
    handle: u32,
    pub(crate) cqe: c_int,
}

/// `struct ibv_srq`, a prefix.
#[repr(C)]
pub(crate) struct Srq {
    pub(crate) context: *mut Context,
    pub(crate) srq_context: *mut c_void,
}

/// `struct ibv_qp`, a prefix.
#[repr(C)]
pub(crate) struct Qp {
    pub(crate) context: *mut Context,
    pub(crate) qp_context: *mut c_void,
    pd: *mut Pd,
    send_cq: *mut Cq,
    recv_cq: *mut Cq,
    srq: *mut Srq,
    handle: u32,
    pub(crate) qp_num: u32,
}

/// `struct ibv_qp_cap`.
#[repr(C)]
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub(crate) struct QpCap {
    pub(crate) max_send_wr: u32,
    pub(crate) max_recv_wr: u32,
    pub(crate) max_send_sge: u32,
    pub(crate) max_recv_sge: u32,
    pub(crate) max_inline_data: u32,
}

/// `struct ibv_qp_init_attr`.
#[repr(C)]
pub(crate) struct QpInitAttr {
    pub(crate) qp_context: *mut c_void,
    pub(crate) send_cq: *mut Cq,
    pub(crate) recv_cq: *mut Cq,
    pub(crate) srq: *mut Srq,
    pub(crate) cap: QpCap,
    pub(crate) qp_type: c_int,
    pub(crate) sq_sig_all: c_int,
}

/// `IBV_QPT_RC`.
pub(crate) const QPT_RC: c_int = 2;

/// `struct ibv_srq_init_attr`.
#[repr(C)]
pub(crate) struct SrqInitAttr {
    pub(crate) srq_context: *mut c_void,
    pub(crate) max_wr: u32,
    pub(crate) max_sge: u32,
    pub(crate) srq_limit: u32,
}

/// `struct ibv_global_route`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct GlobalRoute {
    pub(crate) dgid: Gid,
    pub(crate) flow_label: u32,
    pub(crate) sgid_index: u8,
    pub(crate) hop_limit: u8,
    pub(crate) traffic_class: u8,
}

/// `struct ibv_ah_attr`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct AhAttr {
    pub(crate) grh: GlobalRoute,
    pub(crate) dlid: u16,
    pub(crate) sl: u8,
    pub(crate) src_path_bits: u8,
    pub(crate) static_rate: u8,
    pub(crate) is_global: u8,
    pub(crate) port_num: u8,
}

/// `struct ibv_qp_attr`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct QpAttr {
    pub(crate) qp_state: c_int,
    pub(crate) cur_qp_state: c_int,
    pub(crate) path_mtu: c_int,
    pub(crate) path_mig_state: c_int,
    pub(crate) qkey: u32,
    pub(crate) rq_psn: u32,
    pub(crate) sq_psn: u32,
    pub(crate) dest_qp_num: u32,
    pub(crate) qp_access_flags: c_uint,
    pub(crate) cap: QpCap,
    pub(crate) ah_attr: AhAttr,
    pub(crate) alt_ah_attr: AhAttr,
    pub(crate) pkey_index: u16,
    pub(crate) alt_pkey_index: u16,
    pub(crate) en_sqd_async_notify: u8,
    pub(crate) sq_draining: u8,
    pub(crate) max_rd_atomic: u8,
    pub(crate) max_dest_rd_atomic: u8,
    pub(crate) min_rnr_timer: u8,
    pub(crate) port_num: u8,
    pub(crate) timeout: u8,
    pub(crate) retry_cnt: u8,
    pub(crate) rnr_retry: u8,
    pub(crate) alt_port_num: u8,
    pub(crate) alt_timeout: u8,
    pub(crate) rate_limit: u32,
}

/// `enum ibv_qp_attr_mask`.
pub(crate) mod mask {
    use super::c_int;

    pub(crate) const STATE: c_int = 1;
    pub(crate) const ACCESS_FLAGS: c_int = 1 << 3;
    pub(crate) const PKEY_INDEX: c_int = 1 << 4;
    pub(crate) const PORT: c_int = 1 << 5;
    pub(crate) const AV: c_int = 1 << 7;
    pub(crate) const PATH_MTU: c_int = 1 << 8;
    pub(crate) const TIMEOUT: c_int = 1 << 9;
    pub(crate) const RETRY_CNT: c_int = 1 << 10;
    pub(crate) const RNR_RETRY: c_int = 1 << 11;
    pub(crate) const RQ_PSN: c_int = 1 << 12;
    pub(crate) const MAX_QP_RD_ATOMIC: c_int = 1 << 13;
    pub(crate) const MIN_RNR_TIMER: c_int = 1 << 15;
    pub(crate) const SQ_PSN: c_int = 1 << 16;
    pub(crate) const MAX_DEST_RD_ATOMIC: c_int = 1 << 17;
    pub(crate) const DEST_QPN: c_int = 1 << 20;
}

/// `enum ibv_qp_state`.
pub(crate) mod qp_state {
    use super::c_int;

    pub(crate) const RESET: c_int = 0;
    pub(crate) const INIT: c_int = 1;
    pub(crate) const READY_TO_RECEIVE: c_int = 2;
    pub(crate) const READY_TO_SEND: c_int = 3;
    pub(crate) const ERROR: c_int = 6;
}

/// `enum ibv_access_flags`.
pub(crate) mod access {
    use super::c_int;

    pub(crate) const LOCAL_WRITE: c_int = 1;
    pub(crate) const REMOTE_WRITE: c_int = 1 << 1;
    pub(crate) const REMOTE_READ: c_int = 1 << 2;
    pub(crate) const REMOTE_ATOMIC: c_int = 1 << 3;
    pub(crate) const ON_DEMAND: c_int = 1 << 6;
}

/// `struct ibv_sge`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Sge {
    pub(crate) addr: u64,
    pub(crate) length: u32,
    pub(crate) lkey: u32,
}

/// The `rdma` and `atomic` members of the union in `struct ibv_send_wr`, laid over each other:
/// `rdma` has its key where `atomic` has the compared or added value.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) union RemotePart {
    pub(crate) rdma: RdmaPart,
    pub(crate) atomic: AtomicPart,
}

/// `wr.rdma`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct RdmaPart {
    pub(crate) remote_addr: u64,
    pub(crate) rkey: u32,
}

/// `wr.atomic`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct AtomicPart {
    pub(crate) remote_addr: u64,
    pub(crate) compare_add: u64,
    pub(crate) swap: u64,
    pub(crate) rkey: u32,
}

/// `struct ibv_send_wr`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct SendWr {
    pub(crate) wr_id: u64,
    pub(crate) next: *mut SendWr,
    pub(crate) sg_list: *mut Sge,
    pub(crate) num_sge: c_int,
    pub(crate) opcode: c_int,
    pub(crate) send_flags: c_uint,
    /// Network byte order.
    pub(crate) imm_data: u32,
    pub(crate) remote: RemotePart,
    pub(crate) xrc_remote_srqn: u32,
    pub(crate) tail: [u64; 6],
}

impl std::fmt::Debug for SendWr {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SendWr").field("wr_id", &self.wr_id).finish_non_exhaustive()
    }
}

impl SendWr {
    pub(crate) const EMPTY: Self = Self {
        wr_id: 0,
        next: std::ptr::null_mut(),
        sg_list: std::ptr::null_mut(),
        num_sge: 0,
        opcode: 0,
        send_flags: 0,
        imm_data: 0,
        remote: RemotePart {
            atomic: AtomicPart { remote_addr: 0, compare_add: 0, swap: 0, rkey: 0 },
        },
        xrc_remote_srqn: 0,
        tail: [0; 6],
    };
}

/// `enum ibv_wr_opcode`.
pub(crate) mod wr {
    use super::c_int;

    pub(crate) const RDMA_WRITE: c_int = 0;
    pub(crate) const RDMA_WRITE_WITH_IMM: c_int = 1;
    pub(crate) const SEND: c_int = 2;
    pub(crate) const SEND_WITH_IMM: c_int = 3;
    pub(crate) const RDMA_READ: c_int = 4;
    pub(crate) const ATOMIC_CMP_AND_SWP: c_int = 5;
    pub(crate) const ATOMIC_FETCH_AND_ADD: c_int = 6;
}

/// `enum ibv_send_flags`.
pub(crate) mod send_flag {
    use super::c_uint;

    pub(crate) const FENCE: c_uint = 1;
    pub(crate) const SIGNALED: c_uint = 1 << 1;
    pub(crate) const INLINE: c_uint = 1 << 3;
}

/// `struct ibv_recv_wr`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct RecvWr {
    pub(crate) wr_id: u64,
    pub(crate) next: *mut RecvWr,
    pub(crate) sg_list: *mut Sge,
    pub(crate) num_sge: c_int,
}

impl RecvWr {
    pub(crate) const EMPTY: Self =
        Self { wr_id: 0, next: std::ptr::null_mut(), sg_list: std::ptr::null_mut(), num_sge: 0 };
}

/// `struct ibv_wc`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Wc {
    pub(crate) wr_id: u64,
    pub(crate) status: c_int,
    pub(crate) opcode: c_int,
    pub(crate) vendor_err: u32,
    pub(crate) byte_len: u32,
    /// Network byte order.
    pub(crate) imm_data: u32,
    pub(crate) qp_num: u32,
    pub(crate) src_qp: u32,
    pub(crate) wc_flags: c_uint,
    pub(crate) pkey_index: u16,
    pub(crate) slid: u16,
    pub(crate) sl: u8,
    pub(crate) dlid_path_bits: u8,
}

/// `IBV_WC_WITH_IMM`.
pub(crate) const WC_WITH_IMM: c_uint = 1 << 1;
/// `IBV_WC_RECV_RDMA_WITH_IMM`.
pub(crate) const WC_RECV_RDMA_WITH_IMM: c_int = (1 << 7) + 1;

/// `enum ibv_wc_status`.
pub(crate) mod wc_status {
    use super::c_int;

    pub(crate) const SUCCESS: c_int = 0;
    pub(crate) const LOC_LEN_ERR: c_int = 1;
    pub(crate) const LOC_QP_OP_ERR: c_int = 2;
    pub(crate) const LOC_EEC_OP_ERR: c_int = 3;
    pub(crate) const LOC_PROT_ERR: c_int = 4;
    pub(crate) const WR_FLUSH_ERR: c_int = 5;
    pub(crate) const MW_BIND_ERR: c_int = 6;
    pub(crate) const BAD_RESP_ERR: c_int = 7;
    pub(crate) const LOC_ACCESS_ERR: c_int = 8;
    pub(crate) const REM_INV_REQ_ERR: c_int = 9;
    pub(crate) const REM_ACCESS_ERR: c_int = 10;
    pub(crate) const REM_OP_ERR: c_int = 11;
    pub(crate) const RETRY_EXC_ERR: c_int = 12;
    pub(crate) const RNR_RETRY_EXC_ERR: c_int = 13;
    pub(crate) const LOC_RDD_VIOL_ERR: c_int = 14;
    pub(crate) const REM_INV_RD_REQ_ERR: c_int = 15;
    pub(crate) const REM_ABORT_ERR: c_int = 16;
    pub(crate) const FATAL_ERR: c_int = 19;
    pub(crate) const RESP_TIMEOUT_ERR: c_int = 20;
    pub(crate) const GENERAL_ERR: c_int = 21;
}

/// `struct ibv_async_event`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct AsyncEvent {
    /// A pointer to the object, or the port's number in its low half.
    pub(crate) element: *mut c_void,
    pub(crate) event_type: c_int,
}

/// `enum ibv_event_type`.
pub(crate) mod event {
    use super::c_int;

    pub(crate) const CQ_ERR: c_int = 0;
    pub(crate) const QP_FATAL: c_int = 1;
    pub(crate) const QP_REQ_ERR: c_int = 2;
    pub(crate) const QP_ACCESS_ERR: c_int = 3;
    pub(crate) const DEVICE_FATAL: c_int = 8;
    pub(crate) const PORT_ACTIVE: c_int = 9;
    pub(crate) const PORT_ERR: c_int = 10;
    pub(crate) const LID_CHANGE: c_int = 11;
    pub(crate) const SRQ_ERR: c_int = 14;
    pub(crate) const GID_CHANGE: c_int = 18;
}

#[cfg(target_pointer_width = "64")]
const _: () = {
    assert!(size_of::<Device>() == 664 && offset_of!(Device, name) == 24);
    assert!(size_of::<ContextOps>() == 256);
    assert!(offset_of!(ContextOps, poll_cq) == 88);
    assert!(offset_of!(ContextOps, req_notify_cq) == 96);
    assert!(offset_of!(ContextOps, post_srq_recv) == 160);
    assert!(offset_of!(ContextOps, post_send) == 200);
    assert!(offset_of!(ContextOps, post_recv) == 208);
    assert!(offset_of!(Context, async_fd) == 268);
    assert!(size_of::<DeviceAttr>() == 232 && offset_of!(DeviceAttr, phys_port_cnt) == 227);
    assert!(size_of::<OdpCaps>() == 24);
    assert!(size_of::<DeviceAttrEx>() == 400);
    assert!(offset_of!(DeviceAttrEx, device_cap_flags_ex) == 280);
    assert!(size_of::<PortAttr>() == 52 && offset_of!(PortAttr, link_layer) == 46);
    assert!(size_of::<Gid>() == 16);
    assert!(offset_of!(Mr, lkey) == 36 && offset_of!(Mr, rkey) == 40);
    assert!(offset_of!(Qp, qp_num) == 52 && offset_of!(Cq, cqe) == 28);
    assert!(size_of::<QpCap>() == 20 && size_of::<QpInitAttr>() == 64);
    assert!(size_of::<SrqInitAttr>() == 24);
    assert!(size_of::<AhAttr>() == 32 && size_of::<QpAttr>() == 144);
    assert!(offset_of!(QpAttr, ah_attr) == 56 && offset_of!(QpAttr, timeout) == 130);
    assert!(size_of::<Sge>() == 16 && size_of::<RecvWr>() == 32);
    assert!(size_of::<SendWr>() == 128 && offset_of!(SendWr, remote) == 40);
    assert!(size_of::<Wc>() == 48 && offset_of!(Wc, qp_num) == 28);
    assert!(size_of::<AsyncEvent>() == 16);
    assert!(size_of::<ContextExtension>() == 184);
    assert!(size_of::<ModifyCqAttr>() == 8);
};

#[cfg(test)]
mod tests;

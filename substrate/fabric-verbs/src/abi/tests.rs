//! The declarations against the header of this machine, where there is one.

#![allow(clippy::unwrap_used, reason = "a test ends where its set-up breaks")]

use std::collections::BTreeMap;
use std::io::Write as _;
use std::process::Command;

use super::*;

/// One line of the comparison: the expression in C, and what we declared.
macro_rules! facts {
    ($( $c:literal : size $ours:ty { $($field:literal = $own:ident),* $(,)? } )+
     tail { $( $tc:literal : $tours:ty { $($tfield:literal = $town:ident),* $(,)? } )* }) => {{
        let mut facts: Vec<(String, usize)> = Vec::new();
        $(
            facts.push((format!("sizeof({})", $c), size_of::<$ours>()));
            $(facts.push((format!("offsetof({}, {})", $c, $field), offset_of!($ours, $own)));)*
        )+
        $( $(facts.push((format!("offsetof({}, {})", $tc, $tfield), offset_of!($tours, $town)));)* )*
        facts
    }};
}

fn ours() -> Vec<(String, usize)> {
    let mut facts = facts! {
        "struct ibv_device": size Device {
            "node_type" = node_type, "transport_type" = transport_type, "name" = name,
            "dev_name" = dev_name, "ibdev_path" = ibdev_path,
        }
        "struct ibv_context_ops": size ContextOps {
            "poll_cq" = poll_cq, "req_notify_cq" = req_notify_cq,
            "post_srq_recv" = post_srq_recv, "post_send" = post_send, "post_recv" = post_recv,
        }
        "struct ibv_device_attr": size DeviceAttr {
            "node_guid" = node_guid, "max_mr_size" = max_mr_size, "max_qp_wr" = max_qp_wr,
            "device_cap_flags" = device_cap_flags, "max_sge" = max_sge,
            "max_sge_rd" = max_sge_rd, "max_cqe" = max_cqe, "max_mr" = max_mr,
            "max_qp_rd_atom" = max_qp_rd_atom, "max_qp_init_rd_atom" = max_qp_init_rd_atom,
            "atomic_cap" = atomic_cap, "max_srq_wr" = max_srq_wr, "max_srq_sge" = max_srq_sge,
            "phys_port_cnt" = phys_port_cnt,
        }
        "struct ibv_device_attr_ex": size DeviceAttrEx {
            "comp_mask" = comp_mask, "device_cap_flags_ex" = device_cap_flags_ex,
            "cq_mod_caps.max_cq_count" = max_cq_count,
            "cq_mod_caps.max_cq_period" = max_cq_period_us,
        }
        "struct ibv_modify_cq_attr": size ModifyCqAttr {
            "moderate.cq_count" = cq_count, "moderate.cq_period" = cq_period_us,
        }
        "struct ibv_port_attr": size PortAttr {
            "active_mtu" = active_mtu, "gid_tbl_len" = gid_tbl_len, "max_msg_sz" = max_msg_sz,
            "lid" = lid, "link_layer" = link_layer,
        }
        "union ibv_gid": size Gid {}
        "struct ibv_mr": size Mr { "lkey" = lkey, "rkey" = rkey }
        "struct ibv_qp_cap": size QpCap { "max_inline_data" = max_inline_data }
        "struct ibv_qp_init_attr": size QpInitAttr {
            "srq" = srq, "cap" = cap, "qp_type" = qp_type, "sq_sig_all" = sq_sig_all,
        }
        "struct ibv_srq_init_attr": size SrqInitAttr {
            "attr.max_wr" = max_wr, "attr.srq_limit" = srq_limit,
        }
        "struct ibv_global_route": size GlobalRoute { "sgid_index" = sgid_index }
        "struct ibv_ah_attr": size AhAttr { "dlid" = dlid, "port_num" = port_num }
        "struct ibv_qp_attr": size QpAttr {
            "path_mtu" = path_mtu, "rq_psn" = rq_psn, "dest_qp_num" = dest_qp_num,
            "qp_access_flags" = qp_access_flags, "ah_attr" = ah_attr, "pkey_index" = pkey_index,
            "max_rd_atomic" = max_rd_atomic, "max_dest_rd_atomic" = max_dest_rd_atomic,
            "min_rnr_timer" = min_rnr_timer, "port_num" = port_num, "timeout" = timeout,
            "retry_cnt" = retry_cnt, "rnr_retry" = rnr_retry, "rate_limit" = rate_limit,
        }
        "struct ibv_sge": size Sge { "length" = length, "lkey" = lkey }
        "struct ibv_send_wr": size SendWr {
            "next" = next, "sg_list" = sg_list, "num_sge" = num_sge, "opcode" = opcode,
            "send_flags" = send_flags, "imm_data" = imm_data, "wr" = remote,
            "qp_type" = xrc_remote_srqn,
        }
        "struct ibv_recv_wr": size RecvWr { "sg_list" = sg_list, "num_sge" = num_sge }
        "struct ibv_wc": size Wc {
            "status" = status, "opcode" = opcode, "byte_len" = byte_len, "imm_data" = imm_data,
            "qp_num" = qp_num, "wc_flags" = wc_flags, "pkey_index" = pkey_index,
        }
        "struct ibv_async_event": size AsyncEvent { "event_type" = event_type }
        tail {
            "struct ibv_context": Context { "ops" = ops, "async_fd" = async_fd }
            "struct ibv_comp_channel": CompChannel { "fd" = fd }
            "struct ibv_cq": Cq { "cq_context" = cq_context, "cqe" = cqe }
            "struct ibv_srq": Srq { "srq_context" = srq_context }
            "struct ibv_qp": Qp { "qp_context" = qp_context, "qp_num" = qp_num }
        }
    };
    facts.push(("sizeof(struct ibv_context)".to_owned(), CONTEXT_BYTES));
    facts.push(("offsetof(struct ibv_context, abi_compat)".to_owned(), ABI_COMPAT_OFFSET));
    let rdma = offset_of!(SendWr, remote) + offset_of!(RdmaPart, rkey);
    facts.push(("offsetof(struct ibv_send_wr, wr.rdma.rkey)".to_owned(), rdma));
    let atomic = offset_of!(SendWr, remote) + offset_of!(AtomicPart, rkey);
    facts.push(("offsetof(struct ibv_send_wr, wr.atomic.rkey)".to_owned(), atomic));
    let swap = offset_of!(SendWr, remote) + offset_of!(AtomicPart, swap);
    facts.push(("offsetof(struct ibv_send_wr, wr.atomic.swap)".to_owned(), swap));
    // Before the context, counted from its start.
    let before = |offset: usize| size_of::<ContextExtension>() - offset;
    for (field, offset) in [
        ("modify_cq", offset_of!(ContextExtension, modify_cq)),
        ("query_device_ex", offset_of!(ContextExtension, query_device_ex)),
        ("sz", offset_of!(ContextExtension, size)),
    ] {
        let expression = format!(
            "offsetof(struct verbs_context, context) - offsetof(struct verbs_context, {field})"
        );
        facts.push((expression, before(offset)));
    }
    for (name, value) in [
        ("IBV_QPS_ERR", qp_state::ERROR),
        ("IBV_QP_DEST_QPN", mask::DEST_QPN),
        ("IBV_QP_MIN_RNR_TIMER", mask::MIN_RNR_TIMER),
        ("IBV_QP_MAX_DEST_RD_ATOMIC", mask::MAX_DEST_RD_ATOMIC),
        ("IBV_WR_ATOMIC_FETCH_AND_ADD", wr::ATOMIC_FETCH_AND_ADD),
        ("IBV_WC_RECV_RDMA_WITH_IMM", WC_RECV_RDMA_WITH_IMM),
        ("IBV_WC_RNR_RETRY_EXC_ERR", wc_status::RNR_RETRY_EXC_ERR),
        ("IBV_WC_GENERAL_ERR", wc_status::GENERAL_ERR),
        ("IBV_ACCESS_REMOTE_ATOMIC", access::REMOTE_ATOMIC),
        ("IBV_EVENT_GID_CHANGE", event::GID_CHANGE),
        ("IBV_EVENT_PORT_ERR", event::PORT_ERR),
        ("IBV_PORT_ACTIVE", PORT_ACTIVE),
        ("IBV_QPT_RC", QPT_RC),
    ] {
        facts.push((format!("(size_t){name}"), usize::try_from(value).unwrap()));
    }
    facts
}

fn skipped(reason: &str) {
    let _ =
        writeln!(std::io::stderr(), "abi::declarations_agree_with_the_header: skipped: {reason}");
}

#[test]
fn declarations_agree_with_the_header() {
    if !std::path::Path::new("/usr/include/infiniband/verbs.h").exists() {
        return skipped("there is no infiniband/verbs.h (package libibverbs-dev)");
    }
    if Command::new("cc").arg("--version").output().is_err() {
        return skipped("there is no C compiler");
    }
    let ours = ours();
    let mut program = String::from(
        "#include <stddef.h>\n#include <stdio.h>\n#include <infiniband/verbs.h>\nint main(void) {\n",
    );
    for (index, (expression, _)) in ours.iter().enumerate() {
        program.push_str(&format!("  printf(\"{index} %zu\\n\", (size_t)({expression}));\n"));
    }
    program.push_str("  return 0;\n}\n");
    let folder = tempfile::tempdir().unwrap();
    let (source, binary) = (folder.path().join("layout.c"), folder.path().join("layout"));
    std::fs::write(&source, program).unwrap();
    let built = Command::new("cc").arg(&source).arg("-o").arg(&binary).output().unwrap();
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    let told = Command::new(&binary).output().unwrap();
    let theirs: BTreeMap<usize, usize> = String::from_utf8(told.stdout)
        .unwrap()
        .lines()
        .map(|line| {
            let (index, value) = line.split_once(' ').unwrap();
            (index.parse().unwrap(), value.parse().unwrap())
        })
        .collect();
    assert_eq!(theirs.len(), ours.len());
    let differing: Vec<_> = ours
        .iter()
        .enumerate()
        .filter(|(index, (_, own))| theirs[index] != *own)
        .map(|(index, (what, own))| format!("{what}: header {}, here {own}", theirs[&index]))
        .collect();
    assert!(differing.is_empty(), "\n{}", differing.join("\n"));
}

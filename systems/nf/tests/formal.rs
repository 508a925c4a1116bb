//! The channel of every design, proved: a bounded search from reset, and induction from any state that
//! agrees with the model. Two entries, the least that a channel may have.

#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout)]

use std::path::Path;
use std::process::Command;

/// What should be inside, in front of the module's end: the same entries, in a shift register.
const MODEL: &str = "
    reg [W-1:0] q [0:D-1];
    reg [A:0] n;
    reg begun = 0;
    integer k;
    always @(posedge clk) begin
        begun <= 1;
        if (!begun) assume (rst);
        if (rst) n <= 0;
        else begin
            if (pop) for (k = 0; k + 1 < D; k = k + 1) q[k] <= q[k + 1];
            if (push) q[pop ? n - 1 : n] <= wdata;
            n <= n + push - pop;
        end
        if (begun) begin
            assert (n == count && count <= D && rp < D && wp < D);
            assert (wp == (rp + count) % D);
            assert (wready == (n < D) && rvalid == (n != 0));
            if (rvalid) assert (rdata == q[0]);
            for (k = 0; k < D; k = k + 1) if (k < n) assert (items[(rp + k) % D] == q[k]);
        end
    end
endmodule";

fn here(program: &str) -> bool {
    Command::new(program).arg("--help").output().is_ok()
}

/// True where the solver finds no way past an assertion.
fn holds(folder: &Path, common: &str, induction: bool) -> bool {
    let end = common.find("endmodule").unwrap();
    let text = format!("{}{MODEL}{}", &common[..end], &common[end + "endmodule".len()..]);
    std::fs::write(folder.join("fifo.v"), text).unwrap();
    let script = "read_verilog -formal fifo.v; chparam -set W 3 -set D 2 -set A 1 np_fifo; \
                  prep -top np_fifo -nordff; memory_map; opt -fast; dffunmap; \
                  write_smt2 -wires fifo.smt2";
    let made = Command::new("yosys").args(["-q", "-p", script]).current_dir(folder).output();
    let made = made.unwrap();
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let mut solver = Command::new("yosys-smtbmc");
    solver.args(["-s", "z3", "-t", if induction { "4" } else { "12" }]);
    if induction {
        solver.arg("-i");
    }
    let output = solver.arg("fifo.smt2").current_dir(folder).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(said.contains("Status: PASSED") || said.contains("Status: FAILED"), "{said}");
    output.status.success()
}

#[test]
fn a_channel_loses_nothing_keeps_order_and_never_overflows() {
    if !["yosys", "yosys-smtbmc", "z3"].into_iter().all(here) {
        println!("skipped: yosys and z3 are not installed; cargo xtask setup installs them");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let common = beeline_verilog::COMMON;
    assert!(holds(folder.path(), common, false), "from reset");
    assert!(holds(folder.path(), common, true), "from any state");
    // Faults are found: room for an entry too many, and entries out of order.
    for (right, wrong) in
        [("count < D", "count <= D"), ("items[wp] <= wdata", "items[rp] <= wdata")]
    {
        assert!(common.contains(right));
        assert!(!holds(folder.path(), &common.replace(right, wrong), false), "{wrong}");
    }
}

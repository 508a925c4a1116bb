//! The channel of every design, proved: a bounded search from reset, and induction from any state that
//! agrees with the model. Two entries, the least that a channel may have.
//!
//! And the delayed write: a small table behind the pipeline is a plain table, for every sequence of
//! items, stalls and gaps of so many clocks from reset.

#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout)]

use std::path::Path;
use std::process::Command;

use beeline_nf::diff::all_hardware;
use beeline_nf::load::compile;
use beeline_passes::{Collision, Options};

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

/// Each item adds to one of four entries and gives the sum.
const TABLE: &str = ".element Table (uint4 in -> uint4 out) {
    .state { local uint2 sums[4]; }
    .handler {
        if (test_input_port(in)) {
            uint4 x = read_input_port(in);
            uint2 s = sums[x[1:0]] + x[3:2];
            sums[x[1:0]] = s;
            set_output_port(out, s);
        }
    }
}
.input uint4 in
.output uint4 out
Table :: it
in -> it -> out
";

/// The table as it should be: what went in is added at once, and what comes out is compared.
const PLAIN: &str = "
module check (input clk, input [3:0] data, input valid, input ready);
    reg begun = 0;
    always @(posedge clk) begun <= 1;
    wire taken, given;
    wire [3:0] result;
    it dut (.clk(clk), .rst(!begun), .in0_data(data), .in0_valid(valid), .in0_ready(taken),
        .out0_data(result), .out0_valid(given), .out0_ready(ready),
        .sig_valid(1'b0), .sig_data(512'b0));
    reg [1:0] sums [0:3];
    reg [1:0] owed [0:7];
    reg [2:0] first = 0, last = 0;
    integer k;
    initial for (k = 0; k < 4; k = k + 1) sums[k] = 0;
    wire [1:0] sum = sums[data[1:0]] + data[3:2];
    always @(posedge clk) if (begun) begin
        if (valid && taken) begin
            sums[data[1:0]] <= sum;
            owed[last] <= sum;
            last <= last + 1;
        end
        if (given && ready) begin
            assert (first != last && result == owed[first]);
            first <= first + 1;
        end
    end
endmodule
";

/// Clocks from reset that are searched: items up to five apart meet in them.
const CLOCKS: u32 = 9;

/// True where no sequence of so many clocks gives a wrong sum.
fn adds_up(folder: &Path, module: &str) -> bool {
    std::fs::write(folder.join("table.v"), format!("{module}{PLAIN}")).unwrap();
    let script = format!(
        "read_verilog -formal table.v; prep -flatten -top check -nordff; memory_map; opt -full; \
         dffunmap; opt_clean; sat -seq {CLOCKS} -prove-asserts -set-init-zero -verify"
    );
    let run = Command::new("yosys").args(["-p", &script]).current_dir(folder).output().unwrap();
    let said = String::from_utf8_lossy(&run.stdout).into_owned();
    let found = String::from_utf8_lossy(&run.stderr).contains("proof did fail");
    assert!(run.status.success() || found, "{said}");
    assert!(said.contains("Solving problem with"), "{said}");
    run.status.success()
}

#[test]
fn a_table_behind_forwarding_is_a_plain_table_for_each_latency_and_collision_policy() {
    if !here("yosys") {
        println!("skipped: yosys is not installed; cargo xtask setup installs it");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let loaded = compile("table.np", TABLE.to_owned(), None);
    let shown = loaded.diagnostics.render(&loaded.sources);
    assert!(!loaded.diagnostics.failed(), "{shown}");
    for (read_latency, collision, slots) in [
        (1, Collision::Old, 1),
        (1, Collision::New, 0),
        (2, Collision::Old, 2),
        (2, Collision::New, 1),
    ] {
        let options = Options { read_latency, collision, ..Options::default() };
        let made = all_hardware(&loaded.compiled.graph, &options).unwrap();
        assert_eq!(made[0].report.interval, 1);
        let text = beeline_verilog::module::module(&made[0], "it");
        assert!(adds_up(folder.path(), &text), "latency {read_latency}, {collision:?} data");
        // Without one of the slots a sum is wrong.
        let valid = text.lines().filter_map(|line| {
            let (register, name) = line.trim().strip_prefix("reg ")?.split_once("; // ")?;
            (name.starts_with("sums_pending") && name.ends_with("_valid")).then_some(register)
        });
        let valid: Vec<String> = valid.map(|register| format!("= {register};")).collect();
        assert_eq!(valid.len(), slots, "{text}");
        for read in valid {
            assert!(text.contains(&read));
            let wrong = text.replace(&read, "= 1'b0;");
            assert!(!adds_up(folder.path(), &wrong), "a slot is of no use");
        }
    }
}

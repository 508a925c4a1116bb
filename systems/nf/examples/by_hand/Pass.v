// A register between two channels: what every element has at least.
module Pass (
    input clk,
    input rst,
    input [511:0] in0_data,
    input in0_valid,
    output in0_ready,
    output [511:0] out0_data,
    output out0_valid,
    input out0_ready,
    input sig_valid,
    input [511:0] sig_data,
    output ans_valid,
    output [511:0] ans_data
);
    assign ans_valid = sig_valid;
    assign ans_data = sig_data;
    reg full;
    reg [511:0] held;
    assign in0_ready = !full || out0_ready;
    assign out0_valid = full;
    assign out0_data = held;
    always @(posedge clk)
        if (rst) full <= 1'b0;
        else if (in0_ready) begin
            full <= in0_valid;
            held <= in0_data;
        end
endmodule

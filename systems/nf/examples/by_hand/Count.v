// Counts packets; a signal reads the count.
module Count (
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
    reg [63:0] count;
    reg full;
    reg [511:0] held;
    assign ans_data = {sig_data[511:128], count, sig_data[63:0]};
    assign in0_ready = !full || out0_ready;
    assign out0_valid = full;
    assign out0_data = held;
    always @(posedge clk)
        if (rst) begin
            full <= 1'b0;
            count <= 64'd0;
        end else if (in0_ready) begin
            full <= in0_valid;
            held <= in0_data;
            if (in0_valid && in0_data[256]) count <= count + 64'd1;
        end
endmodule
